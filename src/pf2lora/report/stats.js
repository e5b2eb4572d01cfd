/* From per-client, per-seed lists to a mean with its deviation over seeds. null is "not known", never zero. */

const known = (values) => values.filter((value) => value !== null && value !== undefined);
const average = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

function estimate(values) {
  const list = known(values);
  if (!list.length) return null;
  const mean = average(list);
  const square = list.reduce((sum, value) => sum + (value - mean) ** 2, 0);
  return { mean, deviation: list.length > 1 ? Math.sqrt(square / (list.length - 1)) : null, count: list.length };
}

/* As estimates.within_spread: null where one seed cannot tell. */
function withinSpread(a, b) {
  if (a.deviation === null || b.deviation === null) return null;
  return Math.abs(a.mean - b.mean) <= Math.hypot(a.deviation, b.deviation) + 1e-12;
}

/* Whether a client's difference between two methods may be chance: by its test rows and the seeds where the page knows, else by the seeds. */
function maybeChance(data, point, metric, method, baseline, k, score, other) {
  if (!score || !other) return null;
  const known = metric === data.metric && point === data.open.point ? data.open.clients[method.method]?.[baseline.method] : null;
  return known ? known[k] : withinSpread(score, other);
}

/* One number from a list over clients: their mean, the worst, or one client's. */
function ofClients(values, who, higherIsBetter) {
  if (!values) return null;
  if (who !== 'mean' && who !== 'worst') return values[Number(who)] ?? null;
  const list = known(values);
  if (!list.length) return null;
  if (who === 'mean') return average(list);
  return higherIsBetter ? Math.min(...list) : Math.max(...list);
}

/* A line over rounds: `pick(round)` gives a seed's number in a round, or null where it has none. */
function curve(series, pick) {
  const byRound = new Map();
  for (const run of series.runs) {
    for (const round of run.rounds) {
      const value = pick(round);
      if (value !== null && value !== undefined) byRound.set(round.round, [...(byRound.get(round.round) ?? []), value]);
    }
  }
  return [...byRound].sort(([a], [b]) => a - b).map(([round, values]) => ({ x: round, ...estimate(values) }));
}

/* What no training gives, for the chosen clients: lines to see the curves against. */
function references(data, metric, who) {
  return data.baselines.map(({ label, scores }) => ({ label, value: ofClients(scores[metric], who, data.metrics[metric].higher_is_better) }))
    .filter(({ value }) => value !== null);
}

/* A method's final score for each client, over seeds. */
function finals(series, point, metric, clients) {
  return clients.map((_, k) => estimate(series.runs.map((run) => run.final[point]?.[metric]?.[k])));
}

/* Round numbers that cover [low, high] in about `count` steps. */
function ticks(low, high, count, whole = false) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  if (whole) step = Math.max(1, Math.round(step));
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

/* What methods are compared by: what clients deploy, where every seed has that. */
const decisivePoint = (data) => data.series.every((series) => series.runs.every((run) => run.final.deploy)) ? 'deploy' : 'served';
const WHEN_SCORED = { deploy: 'deployed', served: 'served' };

/* A method's final score: the mean over clients, then over seeds. */
const finalScore = (series, point, metric) => estimate(series.runs.map((run) => ofClients(run.final[point]?.[metric], 'mean')));
