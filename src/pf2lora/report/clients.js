/* Who gains, who loses: one method against another, client by client; a method alone, what it deploys or serves against
   itself a moment before. */

const WHEN = { deploy: 'deployed', served: 'served', before_averaging: 'before averaging' };
const MISSING = { deploy: ': it has no validation rows to choose by', before_averaging: ': it has no point before averaging', served: '' };

function clientsView(host, data) {
  const names = data.series.map((series) => series.method);
  const method = Math.max(0, names.findIndex((name) => name.startsWith('pf2lora')));
  const others = names.map((_, i) => i).filter((i) => i !== method);
  const baseline = others.find((i) => names[i] === 'local') ?? others[0] ?? method;
  const some = data.series.some((series) => series.runs.some((run) => run.final.deploy));
  const state = { method, baseline, metric: data.metric, point: decisivePoint(data) };
  const summary = el('p', { class: 'verdict', 'aria-live': 'polite' });
  const body = el('div');
  const draw = () => {
    const [text, ...parts] = comparison(data, state);
    summary.textContent = text;
    body.replaceChildren(...parts);
  };
  const set = (key) => (value) => { state[key] = key === 'metric' || key === 'point' ? value : Number(value); draw(); };
  const options = data.series.map((series, i) => [i, series.label]);
  const metrics = Object.entries(data.metrics).map(([name, info]) => [name, info.label]);
  const alone = data.series.length === 1;
  host.append(el('div', { class: 'controls' },
    alone ? null : select('Method', options, state.method, set('method')),
    alone ? null : select('Against', options, state.baseline, set('baseline')),
    select('Score', metrics, state.metric, set('metric')),
    alone && !some ? null : segments('Taken', alone ? [['deploy', 'Deployed, against served'], ['served', 'Served, against before averaging']]
      : [...POINTS, ...(some ? [['deploy', 'Deployed']] : [])], state.point, set('point'))), summary, body);
  draw();
}

/* The summary's text, then the dot plot and its table. */
function comparison(data, state) {
  const info = data.metrics[state.metric];
  const alone = data.series.length === 1;
  const [one] = data.series;
  const earlier = state.point === 'deploy' ? 'served' : 'before_averaging';
  const [method, baseline] = alone ? [state.point, earlier].map((point) => ({ ...one, label: `${one.label}, ${WHEN[point]}` }))
    : [data.series[state.method], data.series[state.baseline]];
  const scores = finals(method, state.point, state.metric, data.clients);
  const others = finals(baseline, alone ? earlier : state.point, state.metric, data.clients);
  const sign = info.higher_is_better ? 1 : -1;
  const rows = data.clients.map((name, k) => ({ name, score: scores[k], other: others[k],
    gain: scores[k] && others[k] ? sign * (scores[k].mean - others[k].mean) : null,
    levels: data.baselines.map(({ label, scores }) => ({ label, value: scores[state.metric]?.[k] ?? null })).filter(({ value }) => value !== null),
    open: alone ? scores[k] && others[k] && withinSpread(scores[k], others[k]) : maybeChance(data, state.point, state.metric, method, baseline, k, scores[k], others[k]) }));
  rows.sort((a, b) => (b.gain ?? -Infinity) - (a.gain ?? -Infinity));
  const measured = rows.filter((row) => row.score);
  if (!measured.length) return [`${method.label} has no such scores${MISSING[state.point]}.`];
  const worst = measured.reduce((low, row) => sign * row.score.mean < sign * low.score.mean ? row : low);
  const ends = rows.flatMap((row) => [row.score, row.other]).filter(Boolean).flatMap((e) => [e.mean - (e.deviation ?? 0), e.mean + (e.deviation ?? 0)]);
  const near = nearLevels([{ points: rows.flatMap((row) => [row.score, row.other]).filter(Boolean) }], rows.flatMap((row) => row.levels), 0.4).map(({ value }) => value);
  ends.push(...near);
  const [low, high] = [Math.min(...ends), Math.max(...ends)];
  const place = (value) => `${(3 + 94 * (high === low ? 0.5 : (value - low) / (high - low))).toFixed(2)}%`;
  const plane = { place, steps: ticks(low, high, 4), low, high };
  const inside = (label) => rows.some((row) => row.levels.some((level) => level.label === label && level.value >= low && level.value <= high));
  const ticked = data.baselines.map(({ label }, i) => !inside(label) ? null : el('span', { class: 'key' }, levelTick(i), label));
  const caption = `${info.label}${info.percent ? ' in %' : ''} per client, largest gain first`;
  return [
    verdict(rows, method, baseline, worst, info),
    el('div', { class: 'scroll' }, el('table', { class: 'dots' }, tableCaption(caption),
      el('thead', {}, el('tr', {}, el('th', { scope: 'col' }, 'Client'),
        el('th', { scope: 'col', class: 'track' }, el('span', { class: 'key' }, dotKey(baseline, true), baseline.label), ' ', el('span', { class: 'key' }, dotKey(method, false), method.label), ' ', ticked),
        el('th', { scope: 'col', class: 'number' }, 'Difference'))),
      el('tbody', {}, rows.map((row) => clientRow(row, method, baseline, row === worst, info, plane, sign))),
      el('tfoot', { 'aria-hidden': 'true' }, el('tr', {}, el('td'), el('td', { class: 'track' }, scaleRow(plane, info)), el('td'))))),
    asTable(`${info.label} of every method, client by client`, () => [['Client', ...data.series.map((series) => series.label), ...data.baselines.map(({ label }) => label)],
      ...data.clients.map((name, k) => [name, ...data.series.map((series) => formatEstimate(finals(series, state.point, state.metric, data.clients)[k], info)),
        ...data.baselines.map(({ scores }) => formatScore(scores[state.metric]?.[k], info))])]),
  ];
}

const scaleRow = ({ place, steps }, info) => svg('svg', { class: 'row-plot', height: 16 },
  steps.map((value) => svg('text', { x: place(value), y: 12, 'text-anchor': 'middle' }, minus(String(Number((info.percent ? value * 100 : value).toPrecision(6)))))));

const dotKey = (series, hollow) => svg('svg', { width: 12, height: 12, 'aria-hidden': 'true', style: colorOf(series) },
  svg('circle', { class: hollow ? 'hollow' : 'dot', cx: 6, cy: 6, r: 4.5 }));

/* Where a client stands without training: a tick, the second kind thinner. */
const levelTick = (i) => svg('svg', { class: 'levels', width: 8, height: 14, 'aria-hidden': 'true' }, svg('line', { class: i ? 'second' : null, x1: 4, x2: 4, y1: 1, y2: 13 }));

function verdict(rows, method, baseline, worst, info) {
  const both = rows.filter((row) => row.gain !== null);
  const low = `Worst client under ${method.label}: ${worst.name} with ${formatEstimate(worst.score, info)}.`;
  if (method === baseline) return low;
  if (!both.length) return `${baseline.label} has no such scores to compare with. ${low}`;
  const unclear = both.filter((row) => row.open).length;
  const gain = both.filter((row) => row.gain > 0).length;
  const lose = both.filter((row) => row.gain < 0).length;
  const seeds = both.every((row) => row.open === null)
    ? 'One seed: a spread needs several.' : `${unclear || 'None'} of these differences ${unclear === 1 ? 'is' : 'are'} no more than chance.`;
  return `${method.label} against ${baseline.label}: ${gain} ${gain === 1 ? 'client gains' : 'clients gain'}, ${lose} ${lose === 1 ? 'loses' : 'lose'}. ${seeds} ${low}`;
}

function clientRow(row, method, baseline, isWorst, info, { place, steps, low, high }, sign) {
  const unclear = row.gain !== null && row.open;
  const text = `${row.name}\n${method.label}: ${formatEstimate(row.score, info)}\n${baseline.label}: ${formatEstimate(row.other, info)}${row.levels.map(({ label, value }) => `\n${label}: ${formatScore(value, info)}`).join('')}${unclear ? '\nmay be chance' : ''}`;
  const tone = row.gain === null || unclear || row.gain === 0 ? 'even' : row.gain > 0 ? 'gain' : 'loss';
  const whisker = (e, series) => e && e.deviation !== null
    ? svg('line', { class: 'whisker', style: colorOf(series), x1: place(e.mean - e.deviation), x2: place(e.mean + e.deviation), y1: 14, y2: 14 }) : null;
  const dot = (e, series, kind) => e ? svg('circle', { class: kind, style: colorOf(series), cx: place(e.mean), cy: 14, r: 5.5 }) : null;
  const graph = svg('svg', { class: 'row-plot', height: 28, role: 'img', tabindex: 0, 'data-tip': text, 'aria-label': text.replaceAll('\n', ', ') },
    steps.map((value) => svg('line', { class: 'guide', x1: place(value), x2: place(value), y1: -5, y2: 33 })),
    row.levels.map(({ value }, i) => value < low || value > high ? null : svg('line', { class: i ? 'level second' : 'level', x1: place(value), x2: place(value), y1: 4, y2: 24 })),
    row.gain === null ? null : svg('line', { class: `link ${tone}`, x1: place(row.other.mean), x2: place(row.score.mean), y1: 14, y2: 14 }),
    whisker(row.other, baseline), whisker(row.score, method), dot(row.other, baseline, 'hollow'), dot(row.score, method, 'dot'));
  const arrow = { gain: '▲', loss: '▼', even: '' }[tone];
  return el('tr', {}, el('th', { scope: 'row' }, cut(row.name), isWorst ? ' ' : null, isWorst ? el('span', { class: 'badge worst' }, 'worst') : null),
    el('td', { class: 'track' }, graph),
    el('td', { class: `number ${tone}` }, row.gain === null ? '–' : `${arrow} ${formatScore(sign * row.gain, info, true)}`.trim(),
      unclear ? el('small', {}, 'may be chance') : null));
}
