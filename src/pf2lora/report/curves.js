/* Learning curves, and the curves of the two shares. One set of hidden methods for all of them. */

const hidden = new Set();
const redraws = [];

const BEST = 6; // of many methods, those that are shown at first
const many = (series) => series.some((item) => item.group);

/* Hides all but some methods, by their labels. */
function showOnly(series, labels) {
  for (const item of series) {
    if (labels.has(item.label)) hidden.delete(item.label);
    else hidden.add(item.label);
  }
  redraws.forEach((redraw) => redraw());
}

/* The labels of the methods with the best scores. */
function bestOf(data, count) {
  const sign = data.metrics[data.metric].higher_is_better ? 1 : -1;
  const scored = data.series.map((series) => [finalScore(series, decisivePoint(data), data.metric), series.label]).filter(([score]) => score);
  return new Set(scored.sort(([a], [b]) => sign * (b.mean - a.mean)).slice(0, count).map(([, label]) => label));
}

function methodButton(item) {
  const emphasise = (on) => document.querySelectorAll('[data-series]').forEach((line) => line.classList.toggle('dim', on && line.dataset.series !== item.label));
  const button = el('button', { type: 'button', 'aria-pressed': String(!hidden.has(item.label)),
    click: () => {
      if (!hidden.delete(item.label)) hidden.add(item.label);
      redraws.forEach((redraw) => redraw());
    },
    pointerenter: () => emphasise(!hidden.has(item.label)), pointerleave: () => emphasise(false),
    focus: () => emphasise(!hidden.has(item.label)), blur: () => emphasise(false) }, swatch(item), el('span', {}, item.label));
  redraws.push(() => button.setAttribute('aria-pressed', String(!hidden.has(item.label))));
  return button;
}

/* The methods as switches; many of them under their headings, with switches for several at once. */
function legend(series, data) {
  if (!many(series)) return el('div', { class: 'legend', role: 'group', 'aria-label': 'Methods shown' }, series.map(methodButton));
  const all = new Set(series.map((item) => item.label));
  const several = (text, labels) => el('button', { type: 'button', class: 'several', click: () => showOnly(series, labels()) }, text);
  const groups = [...new Set(series.map((item) => item.group))];
  return el('div', { class: 'legend-groups', role: 'group', 'aria-label': 'Methods shown' },
    el('div', { class: 'legend' }, several(`Best ${BEST}`, () => bestOf(data, BEST)), several('All', () => all), several('None', () => new Set()),
      groups.length > 1 ? groups.map((group) => several(group, () => new Set(series.filter((item) => item.group === group).map((item) => item.label)))) : null),
    groups.map((group) => el('div', { class: 'legend' }, el('span', { class: 'heading' }, group), series.filter((item) => item.group === group).map(methodButton))));
}

/* Draws now, when a method is switched, and when the width changes. */
function living(figure, draw) {
  let width = 0;
  redraws.push(draw);
  new ResizeObserver(() => {
    if (figure.clientWidth !== width) { width = figure.clientWidth; draw(); }
  }).observe(figure);
}

const visible = (series) => series.filter((item) => !hidden.has(item.label));

const POINTS = [['served', 'Served'], ['before_averaging', 'Before averaging']];

function curvesView(host, data) {
  const scores = Object.keys(data.metrics).filter((name) => name !== 'loss' || name === data.metric);
  /* Scores of generated text are taken once, at the end: one point is no curve, so another score is shown first. */
  const measured = (name) => Math.max(0, ...data.series.flatMap((series) => series.runs.map((run) =>
    run.rounds.filter((round) => known(round.served?.[name] ?? []).length).length)));
  const most = Math.max(...scores.map(measured));
  const first = measured(data.metric) > 1 ? data.metric : scores.find((name) => measured(name) === most);
  const state = { metric: first, point: 'served', loss: 'train', who: 'mean' };
  const validated = data.series.some((series) => series.runs.some((run) => run.rounds.some((round) => round.validation_loss)));
  const validation = (series) => curve(series, (round) => ofClients(round.validation_loss, state.who, false));
  const bestRound = (series) => validation(series).reduce((best, point) => best && best.mean <= point.mean ? best : point, null)?.x ?? null;
  const [score, loss] = [el('figure', { class: 'chart' }), el('figure', { class: 'chart' })];
  const whose = () => state.who === 'mean' ? 'mean over clients' : state.who === 'worst' ? 'worst client' : data.clients[Number(state.who)];
  const drawScore = () => {
    const info = data.metrics[state.metric];
    const lines = visible(data.series).map((series) => ({ series,
      points: curve(series, (round) => ofClients(round[state.point]?.[state.metric], state.who, info.higher_is_better)) }));
    const when = state.point === 'served' ? 'served' : 'before averaging';
    lineChart(score, { marked: bestRound, levels: references(data, state.metric, state.who), title: `${info.label}${info.percent ? ' (%)' : ''}, ${when}, ${whose()}`, lines,
      format: (value) => formatScore(value, info), tickFormat: (value) => minus(String(Number((info.percent ? value * 100 : value).toPrecision(6)))) });
  };
  const drawLoss = () => {
    const own = { train: 'train_loss', validation: 'validation_loss' }[state.loss];
    const pick = (round) => ofClients(own ? round[own] : round[state.loss]?.loss, state.who, false);
    const lines = visible(data.series).map((series) => ({ series, points: curve(series, pick) }));
    const which = { train: 'training loss', validation: 'validation loss, served', served: 'test loss, served', before_averaging: 'test loss, before averaging' }[state.loss];
    lineChart(loss, { marked: bestRound, levels: own || !data.metrics.loss ? [] : references(data, 'loss', state.who), title: `${which}, ${whose()}`, lines, format: (value) => minus(value.toFixed(3)), tickFormat: (value) => minus(String(value)) });
  };
  const set = (key, ...draws) => (value) => { state[key] = value; draws.forEach((draw) => draw()); };
  const losses = [['train', 'Training'], ...(validated ? [['validation', 'Validation']] : []), ...('loss' in data.metrics ? [['served', 'Test, served'], ['before_averaging', 'Test, before']] : [])];
  host.append(legend(data.series, data),
    data.clients.length ? el('div', { class: 'controls' }, select('Client', [['mean', 'Mean over clients'], ['worst', 'Worst client'],
      ...data.clients.map((name, k) => [k, name])], 'mean', set('who', drawScore, drawLoss))) : el('span'),
    el('div', { class: 'pair' },
      el('div', {}, el('div', { class: 'controls' },
        scores.length > 1 ? select('Score', scores.map((name) => [name, data.metrics[name].label]), state.metric, set('metric', drawScore)) : null,
        segments('Taken', POINTS, 'served', set('point', drawScore))), score),
      el('div', {}, el('div', { class: 'controls' }, segments('Loss', losses, 'train', set('loss', drawLoss))), loss)));
  living(score, drawScore);
  living(loss, drawLoss);
}

function sharesView(host, data) {
  const kinds = [
    ['client_share', 'Client adapter against common adapter, ‖s̃DC‖ / ‖sBA‖'],
    ['second_order_share', 'Second-order term’s share of the hypergradient'],
  ];
  const has = (series, key) => series.runs.some((run) => run.rounds.some((round) => round[key] && known(round[key]).length));
  const shown = kinds.map(([key, title]) => ({ key, title, series: data.series.filter((series) => has(series, key)) })).filter(({ series }) => series.length);
  const figures = shown.map(({ key, title, series }) => {
    const figure = el('figure', { class: 'chart' });
    living(figure, () => lineChart(figure, { title, log: true, format: formatShare,
      lines: visible(series).map((item) => ({ series: item, points: curve(item, (round) => ofClients(round[key], 'mean')) })) }));
    return figure;
  });
  const drawn = data.series.filter((series) => shown.some((kind) => kind.series.includes(series)));
  host.append(legend(drawn, data), el('div', { class: 'pair' }, figures));
}
