/* Right labels against answers: one method, seed and client (or all clients) at a time, with each label's figures; and
   rows that were wrong, where their texts were kept. */

function errorsView(host, data) {
  const series = data.series.filter((item) => item.runs.some((run) => run.confusion));
  const runsOf = (i) => series[i].runs.filter((run) => run.confusion);
  const state = { series: 0, seed: 0, client: 'all' };
  const body = el('div');
  const seeds = el('span', { class: 'slot' });
  const show = () => body.replaceChildren(...confusionTables(data, runsOf(state.series)[state.seed], state.client));
  const seedChoice = () => seeds.replaceChildren(runsOf(state.series).length < 2 ? '' : select('Seed', runsOf(state.series).map((run, i) => [i, String(run.seed)]), 0, (value) => { state.seed = Number(value); show(); }));
  host.append(el('div', { class: 'controls' },
    series.length > 1 ? select('Method', series.map((item, i) => [i, item.label]), 0, (value) => { Object.assign(state, { series: Number(value), seed: 0 }); seedChoice(); show(); }) : null,
    seeds, select('Client', [['all', 'All clients'], ...data.clients.map((name, k) => [k, name])], 'all', (value) => { state.client = value; show(); })), body);
  seedChoice();
  show();
}

/* All clients' tables in one; null where one is missing. */
function summedTables(tables) {
  if (!tables.length || tables.some((table) => !table)) return null;
  return tables[0].map((row, i) => row.map((_, j) => tables.reduce((sum, table) => sum + table[i][j], 0)));
}

/* As run/confusion.py: null where there is nothing to divide by. */
function ofLabel(table, i) {
  const [right, rows, answered] = [table[i][i], table[i].reduce((a, b) => a + b, 0), table.reduce((sum, row) => sum + row[i], 0)];
  return { rows, precision: answered ? right / answered : null, recall: rows ? right / rows : null, f1: rows + answered ? 2 * right / (rows + answered) : null };
}

function confusionTables(data, run, client) {
  const table = client === 'all' ? summedTables(run.confusion) : run.confusion[Number(client)];
  if (!table) return [el('p', { class: 'empty' }, 'A model’s outputs are not finite here: there is nothing to count.')];
  const whose = client === 'all' ? 'all clients' : data.clients[Number(client)];
  const share = (value) => value === null ? '–' : `${(value * 100).toFixed(1)}`;
  const labels = data.labels.map((label, i) => ({ label, ...ofLabel(table, i) }));
  const f1s = known(labels.map(({ f1 }) => f1));
  const row = ({ label, rows }, i) => el('tr', {}, el('th', { scope: 'row' }, cut(label)), table[i].map((count, j) => {
    const part = rows ? count / rows : 0;
    return el('td', { class: `${i === j ? 'right ' : ''}${part > 0.6 ? 'deep' : ''}`, style: `--v: ${part.toFixed(3)}`, 'data-tip': `${label}, answered ${data.labels[j]}\n${count} of ${rows} rows` }, String(count));
  }));
  return [el('div', { class: 'pair' },
    el('div', { class: 'scroll' }, el('table', { class: 'heat confusion' }, tableCaption(`Test rows of ${whose}: the right label (rows) and the answer (columns)`),
      el('thead', {}, el('tr', {}, el('th', { scope: 'col' }, 'Right label'), labels.map(({ label }) => el('th', { scope: 'col', class: 'number' }, cut(label))))),
      el('tbody', {}, labels.map(row)))),
    el('div', { class: 'scroll' }, el('table', {}, tableCaption(`Each label, ${whose}, in %${f1s.length ? `; the mean F1 is ${share(average(f1s))}` : ''}`),
      el('thead', {}, el('tr', {}, el('th', { scope: 'col' }, 'Label'), ['F1', 'Precision', 'Recall', 'Test rows'].map((text) => el('th', { scope: 'col', class: 'number' }, text)))),
      el('tbody', {}, labels.map(({ label, rows, precision, recall, f1 }) => el('tr', {}, el('th', { scope: 'row' }, cut(label)),
        [share(f1), share(precision), share(recall), String(rows)].map((text) => el('td', { class: 'number' }, text))))))))];
}

function wrongView(host, data) {
  const series = data.series.filter((item) => data.examples.some((example) => example.outputs[item.method] !== undefined));
  const clients = [...new Set(data.examples.map((example) => example.client))];
  const body = el('div');
  const show = (client) => {
    const rows = data.examples.filter((example) => !client || example.client === client);
    body.replaceChildren(el('div', { class: 'scroll' }, el('table', {}, tableCaption(`Test rows that were wrong${client ? `, ${client}` : ''}: the right label, and what was answered, how surely`),
      el('thead', {}, el('tr', {}, ['Client', 'Text', 'Right label', ...series.map((item) => item.label)].map((text) => el('th', { scope: 'col' }, text)))),
      el('tbody', {}, rows.map((example) => el('tr', {}, el('th', { scope: 'row' }, cut(example.client)), el('td', { class: 'words text' }, example.prompt),
        el('td', {}, example.references.join(', ')), series.map((item) => el('td', {}, example.outputs[item.method] ?? '–'))))))));
  };
  host.append(el('div', { class: 'controls' }, select('Client', [['', 'All clients'], ...clients.map((client) => [client, client])], '', show)), body);
  show('');
}
