/* Every method's final score against a cost: a point each, with its name beside it. All of them, as here they are compared. */

const COSTS = [
  ['bytes', 'what a client sends per round', formatBytes],
  ['seconds', 'training time', formatSeconds],
];
const LABEL = 14; // the height of a name

function formatBytes(value) {
  const units = ['B', 'kB', 'MB', 'GB'];
  const power = Math.min(units.length - 1, value > 0 ? Math.floor(Math.log10(value) / 3 + 1e-9) : 0);
  return `${Number((value / 1000 ** power).toPrecision(3))} ${units[power]}`;
}

function formatSeconds(value) {
  return value >= 120 ? `${Number((value / 60).toPrecision(3))} min` : `${Number(value.toPrecision(3))} s`;
}

function tradeoffView(host, data) {
  const point = decisivePoint(data);
  const info = data.metrics[data.metric];
  const figures = COSTS.map(([key, words, format]) => {
    const figure = el('figure', { class: 'chart' });
    living(figure, () => scatter(figure, {
      title: `${info.label}${info.percent ? ' (%)' : ''}, ${WHEN_SCORED[point]}, against ${words}`, info, format, levels: references(data, data.metric, 'mean'),
      dots: data.series.map((series) => ({ series, x: series[key], score: finalScore(series, point, data.metric) })).filter(({ x, score }) => x !== null && score),
    }));
    return figure;
  });
  host.append(el('div', { class: 'pair' }, figures), el('p', { class: 'note' }, 'What is sent is counted with the head, where that is shared. Training time is without evaluation.'));
}

function scatter(host, { title, dots, info, format, levels }) {
  const heading = el('figcaption', {}, title);
  if (!dots.length) {
    host.replaceChildren(heading, el('p', { class: 'empty' }, 'Nothing to draw: no shown method has these values.'));
    return;
  }
  const width = Math.max(260, host.clientWidth);
  const height = Math.max(300, Math.min(560, 60 + dots.length * LABEL * 1.15));
  const margin = { top: 12, right: 14, bottom: 38, left: 54 };
  const most = Math.max(...dots.map(({ x }) => x)) || 1;
  const near = nearLevels(dots.map(({ score }) => ({ points: [score] })), levels);
  const ends = dots.flatMap(({ score }) => [score.mean - (score.deviation ?? 0), score.mean + (score.deviation ?? 0)]).concat(near.map(({ value }) => value));
  const spread = Math.max(...ends) - Math.min(...ends) || Math.abs(ends[0]) || 1;
  const [low, high] = [Math.min(...ends) - spread * 0.05, Math.max(...ends) + spread * 0.05];
  const across = (value) => margin.left + 8 + (value / most) * (width - margin.left - margin.right - 16);
  // A lower score may be the better one: better is always up.
  const share = (value) => (value - low) / (high - low);
  const up = (value) => height - margin.bottom - (info.higher_is_better ? share(value) : 1 - share(value)) * (height - margin.top - margin.bottom);
  const shown = (value) => minus(String(Number((info.percent ? value * 100 : value).toPrecision(6))));
  const placed = dots.map((dot) => ({ ...dot, left: across(dot.x), top: up(dot.score.mean) }));
  const root = svg('svg', { width, height, viewBox: `0 0 ${width} ${height}`, role: 'group', 'aria-label': title },
    svg('g', { class: 'axes' },
      ticks(low, high, 5).map((value) => svg('g', { transform: `translate(0 ${up(value)})` },
        svg('line', { x1: margin.left, x2: width - margin.right }),
        svg('text', { x: margin.left - 8, dy: '0.32em', 'text-anchor': 'end' }, shown(value)))),
      ticks(0, most, Math.max(2, Math.floor(width / 110))).map((value) => svg('text', { x: across(value), y: height - margin.bottom + 18, 'text-anchor': 'middle' }, format(value)))),
    levelLines(near, null, margin.left, width - margin.right, up), names(placed, width, height, margin), placed.map((dot) => mark(dot, up, info, format)));
  host.replaceChildren(heading, el('div', { class: 'plot' }, root), levelKey(levels, near, (value) => formatScore(value, info)), asTable(title, () => [['Method', 'Score', 'Cost'],
    ...dots.map(({ series, x, score }) => [series.label, formatEstimate(score, info), format(x)]),
    ...levels.map(({ label, value }) => [label, formatScore(value, info), '–'])]));
}

function mark({ series, x, score, left, top }, up, info, format) {
  const text = `${series.label}\n${formatEstimate(score, info)}\n${format(x)}`;
  return svg('g', { class: 'point', 'data-series': series.label, style: colorOf(series), tabindex: 0, role: 'img', 'data-tip': text, 'aria-label': text.replaceAll('\n', ', ') },
    score.deviation === null ? null : svg('line', { class: 'whisker', x1: left, x2: left, y1: up(score.mean - score.deviation), y2: up(score.mean + score.deviation) }),
    svg('circle', { class: 'reach', cx: left, cy: top, r: 9 }),
    svg('path', { d: shapeOf(series), transform: `translate(${left} ${top}) scale(1.35)`, class: series.dash % 2 ? 'hollow' : null }));
}

/* The names, each as near to its point as it can be without covering a point or another name; a thin line leads to those
   further away. */
function names(placed, width, height, margin) {
  const box = (x, y, across, down) => ({ x, y, right: x + across, bottom: y + down });
  const meet = (a, b) => a.x < b.right && b.x < a.right && a.y < b.bottom && b.y < a.bottom;
  const taken = placed.map(({ left, top }) => box(left - 7, top - 6, 14, 12));
  const inside = (b) => b.x >= margin.left && b.right <= width && b.y >= 0 && b.bottom <= height - margin.bottom;
  return placed.toSorted((a, b) => a.top - b.top).map(({ series, left, top }) => {
    const label = cutText(series.label);
    const across = label.length * 6.3 + 4;
    const places = Array.from({ length: 48 }, (_, i) => {
      const step = Math.ceil(Math.floor(i / 2) / 2) * (Math.floor(i / 2) % 2 ? 1 : -1);
      const gap = 11 + Math.min(2, Math.abs(step)) * 7;
      const back = i % 2 === 1;
      return { back, gap, middle: top + step * LABEL, box: box(back ? left - gap - across : left + gap, top + step * LABEL - LABEL / 2, across, LABEL) };
    });
    const free = places.find((place) => inside(place.box) && !taken.some((other) => meet(place.box, other))) ?? places[0];
    taken.push(free.box);
    const edge = left + (free.back ? -free.gap : free.gap);
    return svg('g', { class: 'name', 'data-series': series.label },
      free.middle === top ? null : svg('line', { x1: left, y1: top, x2: edge + (free.back ? 2 : -2), y2: free.middle }),
      svg('text', { x: edge, y: free.middle, dy: '0.32em', 'text-anchor': free.back ? 'end' : 'start' }, label === series.label ? null : svg('title', {}, series.label), label));
  });
}
