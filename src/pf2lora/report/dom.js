/* Building blocks: elements, controls, numbers, the tip. Texts only ever enter the page as text nodes. */

const SVG = 'http://www.w3.org/2000/svg';

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === 'function') node.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? '' : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

let lastId = 0;
const freshId = () => `v${++lastId}`;

/* options: [value, label] pairs; onChange gets the value. */
function select(label, options, value, onChange) {
  const box = el('select', { id: freshId(), change: () => onChange(box.value) },
    options.map(([key, text]) => el('option', { value: key, title: text === cutText(text) ? null : text, selected: String(key) === String(value) }, cutText(text))));
  return el('label', { class: 'field', for: box.id }, el('span', {}, label), box);
}

function segments(label, options, value, onChange) {
  const name = freshId();
  return el('fieldset', { class: 'segments' }, el('legend', {}, label),
    el('div', {}, options.map(([key, text]) => el('label', {},
      el('input', { type: 'radio', name, value: key, checked: key === value, change: () => onChange(key) }),
      el('span', {}, text)))));
}

/* A table behind "Show as table": built when it is first opened. `rows()` gives the header row, then the others. */
function asTable(caption, rows) {
  const box = el('div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': caption });
  const details = el('details', { class: 'as-table', toggle: () => { if (details.open) box.replaceChildren(plainTable(caption, rows())); } },
    el('summary', {}, 'Show as table'), box);
  return details;
}

/* Long names end in an ellipsis; the whole is in the title. */
const LONGEST = 32;
const cutText = (text) => text.length > LONGEST ? `${text.slice(0, LONGEST - 1)}…` : text;
const cut = (text) => el('span', { class: 'cut', title: text }, text);

const tableCaption = (text) => el('caption', {}, el('span', {}, text));

function plainTable(caption, [head, ...body]) {
  return el('table', {}, tableCaption(caption),
    el('thead', {}, el('tr', {}, head.map((text) => el('th', { scope: 'col' }, text)))),
    el('tbody', {}, body.map(([first, ...rest]) => el('tr', {},
      el('th', { scope: 'row' }, cut(first)), rest.map((text) => el('td', {}, text))))));
}

/* Numbers: as report/numbers.py writes them. */
const minus = (text) => text.replace('-', '−');

function formatScore(value, info, signed = false) {
  if (value === null || value === undefined) return '–';
  const text = (info.percent ? value * 100 : value).toFixed(info.percent ? 2 : 3);
  return minus(signed && value >= 0 ? `+${text}` : text);
}

const formatEstimate = (e, info) => !e ? '–'
  : formatScore(e.mean, info) + (e.deviation === null ? '' : ` ± ${formatScore(e.deviation, info)}`);

/* Small shares: 0.021, 4.1e−6. */
const formatShare = (value) => value === 0 || Math.abs(value) >= 1e-3 ? String(Number(value.toPrecision(3))) : minus(value.toExponential(1));

/* One tip for the page, shown for anything with data-tip, on hover and on focus. */
const tip = {
  node: el('div', { id: 'tip', 'aria-hidden': 'true', hidden: true }),
  again: null, // shows it anew where the keyboard brought it and the page has scrolled since
  show(content, x, y) {
    this.again = null;
    this.node.replaceChildren(...content);
    this.node.hidden = false;
    const { width, height } = this.node.getBoundingClientRect();
    const page = document.documentElement.clientWidth;
    const left = Math.min(x > page / 2 ? x - width - 14 : x + 14, page - width - 8);
    const above = y - height - 12;
    this.node.style.transform = `translate(${Math.max(8, left)}px, ${above < 8 ? y + 16 : above}px)`;
  },
  hide() { this.node.hidden = true; this.again = null; },
};

const tipLines = (text) => text.split('\n').map((line, i) => el(i ? 'div' : 'strong', {}, line));

function startTips() {
  document.body.append(tip.node);
  const target = (event) => event.target instanceof Element ? event.target.closest('[data-tip]') : null;
  document.addEventListener('pointermove', (event) => {
    const node = target(event);
    if (node) tip.show(tipLines(node.dataset.tip), event.clientX, event.clientY);
    else if (!(event.target instanceof Element && event.target.closest('.plot'))) tip.hide();
  });
  document.addEventListener('focusin', (event) => {
    const node = target(event);
    if (!node) return tip.hide();
    const show = () => {
      const box = node.getBoundingClientRect();
      tip.show(tipLines(node.dataset.tip), box.left + Math.min(box.width / 2, 200), box.top);
      tip.again = show;
    };
    show();
  });
  document.addEventListener('focusout', () => tip.hide());
  document.addEventListener('keydown', (event) => { if (event.key === 'Escape') tip.hide(); });
  document.addEventListener('scroll', () => { if (tip.again) tip.again(); else tip.hide(); }, { passive: true, capture: true });
}
