/* Outputs side by side, with the words in which they differ from one of them marked. */

const PAGE = 6;

/* Words of `text` against words of `base` by their longest common subsequence: [kind, words] runs in order. */
function wordDifferences(base, text) {
  const [a, b] = [base, text].map((words) => words.split(/\s+/).filter(Boolean));
  const common = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      common[i][j] = a[i] === b[j] ? common[i + 1][j + 1] + 1 : Math.max(common[i + 1][j], common[i][j + 1]);
    }
  }
  const runs = [];
  const push = (kind, word) => { if (runs.at(-1)?.kind === kind) runs.at(-1).words.push(word); else runs.push({ kind, words: [word] }); };
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) { push('same', a[i]); i++; j++; }
    else if (j >= b.length || (i < a.length && common[i + 1][j] >= common[i][j + 1])) push('gone', a[i++]);
    else push('new', b[j++]);
  }
  return runs;
}

function markedOutput(base, text) {
  if (!text.trim()) return el('p', { class: 'output' }, el('i', {}, 'nothing'));
  const pieces = wordDifferences(base, text).flatMap(({ kind, words }) => {
    const joined = words.join(' ');
    return [kind === 'new' ? el('ins', {}, joined) : kind === 'gone' ? el('del', {}, joined) : joined, kind === 'gone' ? el('span', { class: 'gap' }, ' ') : ' '];
  });
  return el('p', { class: 'output' }, pieces);
}

function examplesView(host, data) {
  if (data.task === 'classification') return wrongView(host, data);
  const labels = new Map(data.series.map((series) => [series.method, series]));
  const clients = [...new Set(data.examples.map((example) => example.client))];
  const methods = [...new Set(data.examples.flatMap((example) => Object.keys(example.outputs)))];
  const state = { client: '', base: methods.includes('homlora') ? 'homlora' : methods[0], shown: PAGE };
  const list = el('div', { class: 'examples' });
  const count = el('p', { class: 'note', 'aria-live': 'polite' });
  const more = el('button', { type: 'button', class: 'plain', click: () => { state.shown += PAGE; draw(); } }, 'Show more');
  const draw = () => {
    const columns = methods.filter((method) => !hidden.has(labels.get(method)?.label));
    const chosen = data.examples.filter((example) => !state.client || example.client === state.client);
    list.replaceChildren(...chosen.slice(0, state.shown).map((example) => exampleCard(example, columns, labels, state.base)));
    count.textContent = `${Math.min(state.shown, chosen.length)} of ${chosen.length} examples`;
    more.hidden = state.shown >= chosen.length;
  };
  const name = (method) => labels.get(method)?.label ?? method;
  host.append(el('div', { class: 'controls' },
    select('Client', [['', 'All clients'], ...clients.map((client) => [client, client])], '', (value) => { Object.assign(state, { client: value, shown: PAGE }); draw(); }),
    select('Mark differences from', [...methods.map((method) => [method, name(method)]), ['reference', 'The first reference']].map(([key, text]) => [key, text]), state.base, (value) => { state.base = value; draw(); }),
    el('label', { class: 'check' }, el('input', { type: 'checkbox', change: (event) => list.classList.toggle('with-gone', event.target.checked) }), 'Show words left out')),
  count, list, more);
  redraws.push(draw); // methods that are hidden above are hidden here
  draw();
}

function exampleCard(example, methods, labels, base) {
  const against = base === 'reference' ? example.references[0] ?? '' : example.outputs[base] ?? '';
  const column = (method) => {
    const series = labels.get(method);
    const text = example.outputs[method];
    return el('div', { class: 'column' }, el('h4', { style: series ? colorOf(series) : null }, el('span', {}, series?.label ?? method), method === base ? el('span', { class: 'badge' }, 'compared with') : null),
      text === undefined ? el('p', { class: 'output' }, '–') : method === base ? el('p', { class: 'output' }, text) : markedOutput(against, text));
  };
  return el('article', { class: 'example' },
    el('header', {}, el('h3', {}, example.client), el('p', { class: 'prompt' }, example.prompt)),
    example.references.length ? el('div', { class: 'references' }, el('h4', {}, example.references.length > 1 ? 'References' : 'Reference'),
      el('ul', {}, example.references.map((text) => el('li', {}, text || '(no answer)')))) : null,
    el('div', { class: 'columns' }, methods.map(column)));
}
