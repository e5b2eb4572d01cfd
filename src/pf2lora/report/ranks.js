/* Client × layer: the learned rank, with a slider over rounds. A table, so that every value can be read as text. */

/* The parts of the layers' names that tell them apart: "encoder.layer.3.attention.self.query" becomes "3 query". */
function shortNames(layers) {
  const parts = layers.map((name) => name.split('.'));
  const differs = (i) => parts.some((list) => list[i] !== parts[0][i]);
  const width = Math.max(...parts.map((list) => list.length));
  const kept = Array.from({ length: width }, (_, i) => i).filter(differs);
  return parts.map((list) => (kept.length ? kept.map((i) => list[i]).filter(Boolean) : list.slice(-1)).join(' '));
}

function ranksView(host, data) {
  const series = data.series.filter((item) => item.runs.some(rankRounds));
  const state = { series: 0, seed: 0, step: Infinity };
  const body = el('div');
  const show = () => body.replaceChildren(...rankPicture(data, runsOf()[state.seed], state, topRank(series)));
  const runsOf = () => series[state.series].runs.filter(rankRounds);
  const seeds = el('span', { class: 'slot' });
  const seedChoice = () => seeds.replaceChildren(select('Seed', runsOf().map((run, i) => [i, String(run.seed)]), 0, (value) => { state.seed = Number(value); show(); }));
  host.append(el('div', { class: 'controls' },
    select('Method', series.map((item, i) => [i, item.label]), 0, (value) => { Object.assign(state, { series: Number(value), seed: 0 }); seedChoice(); show(); }), seeds), body);
  seedChoice();
  show();
}

const rankRounds = (run) => { const list = run.rounds.filter((round) => round.ranks); return list.length ? list : null; };
const topRank = (series) => series.flatMap((item) => item.runs).flatMap((run) => run.rounds)
  .reduce((top, round) => (round.ranks ?? []).flat().reduce((high, rank) => Math.max(high, rank ?? 0), top), 1);

function rankPicture(data, run, state, top) {
  const rounds = rankRounds(run);
  state.step = Math.min(state.step, rounds.length - 1);
  const names = shortNames(run.layers);
  const cells = rounds[0].ranks.map((row) => row.map(() => el('td', { tabindex: -1 })));
  const means = cells.map(() => el('td', { class: 'mean' }));
  const own = cells.map(() => el('td', { class: 'mean' }));
  const shares = rounds.some((round) => round.client_share);
  const apart = data.apart.some((value) => value !== null);
  const output = el('output', { class: 'round' });
  const paint = () => {
    const { round, ranks, client_share: share } = rounds[state.step];
    output.textContent = `round ${round}`;
    slider.setAttribute('aria-valuetext', `round ${round}`);
    ranks.forEach((row, k) => {
      row.forEach((rank, i) => paintRank(cells[k][i], rank, top, `${data.clients[k] ?? `client ${k + 1}`}\n${run.layers[i]}\nrank ${rank ?? 'unknown'} in round ${round}`));
      means[k].textContent = known(row).length ? average(known(row)).toFixed(1) : '–';
      own[k].textContent = share?.[k] === null || share?.[k] === undefined ? '–' : formatShare(share[k]);
    });
  };
  const slider = el('input', { type: 'range', id: freshId(), min: 0, max: rounds.length - 1, step: 1, value: state.step,
    input: () => { state.step = Number(slider.value); paint(); } });
  if (rounds.length === 1) slider.disabled = true;
  roam(cells);
  paint();
  return [
    el('div', { class: 'slider' }, el('label', { for: slider.id }, 'Round'), slider, output),
    el('div', { class: 'scroll' }, el('table', { class: 'heat' },
      tableCaption(`Learned rank per client and layer (directions that hold 90 % of s·BA + s̃·DC), 0 to ${top}. Arrow keys move between the cells.`),
      el('thead', {}, el('tr', {}, el('th', { scope: 'col' }, 'Client'),
        names.map((name, i) => el('th', { scope: 'col', class: 'layer', 'data-tip': run.layers[i] }, el('span', {}, name))), el('th', { scope: 'col', class: 'mean' }, 'mean rank'),
        shares ? el('th', { scope: 'col', class: 'mean', 'data-tip': 'Own part\n‖s̃DC‖ / ‖sBA‖ in this round' }, 'own part') : null,
        apart ? el('th', { scope: 'col', class: 'mean', 'data-tip': 'How different its labels are\n0: mixed as everybody’s\n1: nothing in common' }, 'labels apart') : null)),
      el('tbody', {}, cells.map((row, k) => el('tr', {}, el('th', { scope: 'row' }, cut(data.clients[k] ?? `client ${k + 1}`)), row, means[k], shares ? own[k] : null,
        apart ? el('td', { class: 'mean' }, data.apart[k] === null ? '–' : data.apart[k].toFixed(2)) : null))))),
    el('div', { class: 'scale', 'aria-hidden': 'true' }, '0', el('span', { class: 'ramp' }), String(top)),
  ];
}

function paintRank(cell, rank, top, text) {
  cell.textContent = rank ?? '–';
  cell.dataset.tip = text;
  cell.style.setProperty('--v', (rank ?? 0) / top);
  cell.classList.toggle('deep', (rank ?? 0) / top > 0.6);
}

/* One tab stop for the whole grid; the arrow keys move inside it. */
function roam(cells) {
  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  if (cells[0]?.[0]) cells[0][0].tabIndex = 0;
  cells.forEach((row, k) => row.forEach((cell, i) => cell.addEventListener('keydown', (event) => {
    const move = moves[event.key];
    const next = move && cells[k + move[0]]?.[i + move[1]];
    if (!move) return;
    event.preventDefault();
    if (!next) return;
    cell.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  })));
}
