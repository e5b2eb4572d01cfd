/* Lines over rounds with a band of ± one deviation; read by pointer, by finger and by the arrow keys. */

const DASHES = ['', '6 4', '2 3', '10 4 2 4', '14 5'];
const SHAPES = {
  circle: 'M-3.4,0a3.4,3.4 0 1,0 6.8,0a3.4,3.4 0 1,0 -6.8,0',
  square: 'M-3,-3h6v6h-6z',
  triangle: 'M0,-4.2L3.9,2.8H-3.9z',
  diamond: 'M0,-4.3L4.3,0L0,4.3L-4.3,0z',
};
const shapeOf = (series) => Object.values(SHAPES)[(series.color + (series.color >= 4 ? 1 : 0)) % 4];
const dashOf = (series) => DASHES[series.dash % DASHES.length];
const colorOf = (series) => `color: var(--c${series.color})`;

function swatch(series) {
  return svg('svg', { class: 'swatch', viewBox: '0 0 28 12', width: 28, height: 12, 'aria-hidden': 'true', style: colorOf(series) },
    svg('line', { x1: 1, x2: 27, y1: 6, y2: 6, 'stroke-dasharray': dashOf(series) }),
    svg('path', { d: shapeOf(series), transform: 'translate(14 6)' }));
}

/* lines: [{ series, points: [{ x, mean, deviation }] }]; `marked(series)` is the round that gets a ring, or null;
   `levels` are [{ label, value }] to see the lines against. */
function lineChart(host, { title, lines, format, tickFormat = format, log = false, marked = () => null, levels = [] }) {
  const drawn = lines.filter((line) => line.points.length);
  const heading = el('figcaption', {}, title);
  if (!drawn.length) {
    host.replaceChildren(heading, el('p', { class: 'empty' }, 'Nothing to draw: no shown method has these values.'));
    return;
  }
  const near = nearLevels(drawn, levels);
  const frame = scales(host, drawn, log, near);
  const root = svg('svg', { width: frame.width, height: frame.height, viewBox: `0 0 ${frame.width} ${frame.height}`, tabindex: 0, role: 'img',
    'aria-label': `${summary(title, drawn, format)} Left and right arrow keys read the rounds.` });
  // The first method lies on top of those it is compared with.
  root.append(axes(frame, tickFormat), levelLines(near, frame, frame.margin.left, frame.width - frame.margin.right, frame.y), ...drawn.toReversed().map((line) => lineGroup(line, frame, marked(line.series))));
  const status = el('div', { class: 'quiet', 'aria-live': 'polite' });
  const table = asTable(title, () => [...lineRows(drawn, format), ...levels.map(({ label, value }) => [label, ...drawn.map(() => format(value))])]);
  host.replaceChildren(heading, el('div', { class: 'plot' }, root), levelKey(levels, near, format), status, table);
  follow(root, drawn, frame, format, status);
}

/* Levels that are far off would press the lines together: they are told below the chart instead. */
function nearLevels(lines, levels, far = 1.5) {
  const values = lines.flatMap((line) => line.points.map((point) => point.mean));
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const reach = Math.max(high - low, Math.abs(high) * 0.05) * far;
  return levels.filter(({ value }) => value >= low - reach && value <= high + reach);
}

function levelLines(levels, frame, left, right, up) {
  return svg('g', { class: 'levels' }, levels.map(({ value }, i) =>
    svg('line', { x1: left, x2: right, y1: up(value), y2: up(value), 'stroke-dasharray': i % 2 ? '1 4' : '7 5' })));
}

function levelKey(levels, near, format) {
  if (!levels.length) return '';
  const key = (level) => near.includes(level) ? svg('svg', { class: 'levels', width: 26, height: 8, 'aria-hidden': 'true' },
    svg('line', { x1: 0, x2: 26, y1: 4, y2: 4, 'stroke-dasharray': near.indexOf(level) % 2 ? '1 4' : '7 5' })) : null;
  return el('p', { class: 'level-key' }, levels.map((level) => el('span', { class: 'key' }, key(level), `${level.label} ${format(level.value)}`)));
}

function scales(host, lines, log, levels) {
  const points = [...lines.flatMap((line) => line.points)];
  const shown = levels.map(({ value }) => value);
  const xs = [...new Set(points.map((point) => point.x))].sort((a, b) => a - b);
  const width = Math.max(260, host.clientWidth);
  const height = Math.round(Math.min(320, Math.max(220, width * 0.55)));
  const margin = { top: 12, right: 14, bottom: 38, left: 54 };
  const positive = log && points.every((point) => point.mean > 0);
  const means = [...points.map((point) => point.mean), ...shown];
  const useLog = positive && Math.max(...means) / Math.min(...means) > 20;
  const bounds = useLog ? means : points.flatMap(({ mean, deviation }) => [mean - (deviation ?? 0), mean + (deviation ?? 0)]).concat(shown);
  let [low, high] = [Math.min(...bounds), Math.max(...bounds)];
  if (useLog) [low, high] = [10 ** Math.floor(Math.log10(low)), 10 ** Math.ceil(Math.log10(high))];
  else if (low === high) [low, high] = [low - Math.abs(low || 1) * 0.1, high + Math.abs(high || 1) * 0.1];
  else [low, high] = [low - (high - low) * 0.04, high + (high - low) * 0.04];
  const along = (value, a, b) => a === b ? 0.5 : (value - a) / (b - a);
  const place = useLog ? (value) => along(Math.log10(Math.max(value, low)), Math.log10(low), Math.log10(high)) : (value) => along(value, low, high);
  return {
    xs, width, height, margin, low, high, useLog,
    x: (value) => margin.left + along(value, xs[0], xs.at(-1)) * (width - margin.left - margin.right),
    y: (value) => height - margin.bottom - place(value) * (height - margin.top - margin.bottom),
  };
}

function axes(frame, format) {
  const { width, height, margin, xs, low, high } = frame;
  const steps = frame.useLog
    ? Array.from({ length: Math.round(Math.log10(high / low)) + 1 }, (_, i) => low * 10 ** i)
    : ticks(low, high, 5);
  const across = ticks(xs[0], xs.at(-1), Math.max(2, Math.floor(width / 65)), true).filter((x) => x >= xs[0]);
  return svg('g', { class: 'axes' },
    steps.map((value) => svg('g', { transform: `translate(0 ${frame.y(value)})` },
      svg('line', { x1: margin.left, x2: width - margin.right }),
      svg('text', { x: margin.left - 8, dy: '0.32em', 'text-anchor': 'end' }, format(value)))),
    across.map((value) => svg('text', { x: frame.x(value), y: height - margin.bottom + 18, 'text-anchor': 'middle' }, String(value))),
    svg('text', { class: 'unit', x: width - margin.right, y: height - 3, 'text-anchor': 'end' }, 'round'));
}

function lineGroup({ series, points }, frame, ringed) {
  const at = (point, value) => `${frame.x(point.x).toFixed(1)},${frame.y(value).toFixed(1)}`;
  const banded = points.filter((point) => point.deviation !== null);
  const edge = [...banded.map((point) => at(point, point.mean + point.deviation)),
    ...banded.toReversed().map((point) => at(point, point.mean - point.deviation))];
  const every = Math.ceil(points.length / 12);
  const shown = points.filter((_, i) => (points.length - 1 - i) % every === 0);
  const ring = points.find((point) => point.x === ringed);
  return svg('g', { class: 'line', 'data-series': series.label, style: colorOf(series) },
    edge.length > 2 ? svg('polygon', { class: 'band', points: edge.join(' ') }) : null,
    svg('polyline', { points: points.map((point) => at(point, point.mean)).join(' '), 'stroke-dasharray': dashOf(series) }),
    shown.map((point) => svg('path', { d: shapeOf(series), transform: `translate(${at(point, point.mean)})` })),
    ring ? svg('circle', { class: 'ring', cx: frame.x(ring.x), cy: frame.y(ring.mean), r: 7 }) : null);
}

function summary(title, lines, format) {
  const ends = lines.map(({ series, points }) => `${series.label} ${formatPoint(points.at(-1), format)}`);
  return `${title}. In the last round: ${ends.join('; ')}.`;
}

const formatPoint = (point, format) => format(point.mean) + (point.deviation === null ? '' : ` ± ${format(point.deviation)}`);

function lineRows(lines, format) {
  const rounds = [...new Set(lines.flatMap((line) => line.points.map((point) => point.x)))].sort((a, b) => a - b);
  return [['round', ...lines.map((line) => line.series.label)],
    ...rounds.map((x) => [String(x), ...lines.map((line) => {
      const point = line.points.find((candidate) => candidate.x === x);
      return point ? formatPoint(point, format) : '–';
    })])];
}

/* The cursor: the nearest round to the pointer, or the one the arrow keys reached. */
function follow(root, lines, frame, format, status) {
  const rule = svg('line', { class: 'rule', y1: frame.margin.top, y2: frame.height - frame.margin.bottom, visibility: 'hidden' });
  root.append(rule);
  let index = frame.xs.length - 1;
  const rows = (x) => lines
    .map(({ series, points }) => ({ series, point: points.find((candidate) => candidate.x === x) }))
    .filter(({ point }) => point)
    .sort((a, b) => b.point.mean - a.point.mean);
  const show = (spoken) => {
    const x = frame.xs[index];
    for (const end of ['x1', 'x2']) rule.setAttribute(end, frame.x(x));
    rule.setAttribute('visibility', 'visible');
    const box = root.getBoundingClientRect();
    tip.show([el('strong', {}, `round ${x}`), ...rows(x).map(({ series, point }) => el('div', { class: 'tip-row' },
      swatch(series), el('span', {}, series.label), el('b', {}, formatPoint(point, format))))], box.left + frame.x(x), box.top + box.height * 0.55);
    if (!spoken) return;
    tip.again = () => show(true);
    status.textContent = `Round ${x}: ${rows(x).map(({ series, point }) => `${series.label} ${formatPoint(point, format)}`).join(', ')}`;
  };
  const hide = () => { rule.setAttribute('visibility', 'hidden'); tip.hide(); };
  root.addEventListener('pointermove', (event) => {
    const at = event.clientX - root.getBoundingClientRect().left;
    const distance = (x) => Math.abs(frame.x(x) - at);
    index = frame.xs.reduce((best, x, i) => distance(x) < distance(frame.xs[best]) ? i : best, 0);
    show(false);
  });
  root.addEventListener('pointerleave', hide);
  root.addEventListener('focus', () => { if (root.matches(':focus-visible')) show(true); });
  root.addEventListener('blur', hide);
  root.addEventListener('keydown', (event) => {
    const moves = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: frame.xs.length - 1 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    index = Math.min(Math.max(0, moves[event.key]), frame.xs.length - 1);
    show(true);
  });
}
