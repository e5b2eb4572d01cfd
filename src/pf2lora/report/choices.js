/* What each client deploys, with the validation losses it chose by: one method and one seed at a time. */

const CANDIDATES = { served: 'served', before_averaging: 'before averaging', common: 'the common adapter alone', personal_steps: 'after personal steps' };

function choicesView(host, data) {
  const series = data.series.filter((item) => item.runs.some((run) => run.choices));
  const runsOf = (i) => series[i].runs.filter((run) => run.choices);
  const state = { series: 0, seed: 0 };
  const body = el('div');
  const seeds = el('span', { class: 'slot' });
  const show = () => body.replaceChildren(choiceTable(data, runsOf(state.series)[state.seed]));
  const seedChoice = () => seeds.replaceChildren(runsOf(state.series).length < 2 ? '' : select('Seed', runsOf(state.series).map((run, i) => [i, String(run.seed)]), 0, (value) => { state.seed = Number(value); show(); }));
  host.append(el('div', { class: 'controls' },
    series.length > 1 ? select('Method', series.map((item, i) => [i, item.label]), 0, (value) => { Object.assign(state, { series: Number(value), seed: 0 }); seedChoice(); show(); }) : null,
    seeds), body);
  seedChoice();
  show();
}

function choiceTable(data, run) {
  const candidates = [...new Set(run.choices.flatMap((choice) => Object.keys(choice.last_round)))];
  const last = run.rounds.at(-1).round;
  const loss = (value) => value === null || value === undefined ? '–' : value.toFixed(3);
  const row = (choice, k) => el('tr', {}, el('th', { scope: 'row' }, cut(data.clients[k] ?? `client ${k + 1}`)),
    el('td', { class: 'words' }, CANDIDATES[choice.candidate] ?? choice.candidate, choice.round === last ? null : ` in round ${choice.round}`),
    el('td', { class: 'number' }, loss(choice.validation_loss)),
    candidates.map((name) => el('td', { class: `number${name === choice.candidate && choice.round === last ? ' best' : ''}` },
      el('span', { class: 'value' }, loss(choice.last_round[name])))));
  return el('div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': 'Choices, client by client' },
    el('table', { class: 'headline' }, tableCaption(`Each client’s choice, and the loss on its validation rows: of the choice, and of every candidate after round ${last}`),
      el('thead', {}, el('tr', {}, el('th', { scope: 'col' }, 'Client'), el('th', { scope: 'col' }, 'Deploys'), el('th', { scope: 'col', class: 'number' }, 'Its loss'),
        candidates.map((name) => el('th', { scope: 'col', class: 'number' }, CANDIDATES[name] ?? name)))),
      el('tbody', {}, run.choices.map(row))));
}
