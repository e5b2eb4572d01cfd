/* Every table, those that come later too: it can be saved as csv, reached by keyboard, and says when it goes on sideways. */

/* The table's cells as text, headers of several rows joined, spans filled. */
function tableRows(table) {
  const grid = [];
  [...table.rows].forEach((row, i) => {
    grid[i] ??= [];
    let j = 0;
    for (const cell of row.cells) {
      while (grid[i][j] !== undefined) j++;
      const text = cellText(cell);
      for (let down = 0; down < cell.rowSpan; down++) {
        for (let across = 0; across < Math.min(cell.colSpan, 50); across++) (grid[i + down] ??= [])[j + across] = down && cell.closest('thead') ? '' : text;
      }
      j += cell.colSpan;
    }
  });
  const heads = table.tHead ? table.tHead.rows.length : 0;
  const width = Math.max(...grid.slice(0, heads || 1).map((row) => row.length));
  const head = Array.from({ length: width }, (_, j) => grid.slice(0, heads).map((row) => row[j]).filter(Boolean).join(' '));
  const body = grid.slice(heads).filter((_, i) => { const row = table.rows[i + heads]; return !row?.closest('tfoot') && !row?.classList.contains('group'); });
  return [head, ...body.map((row) => Array.from({ length: width }, (_, j) => row[j] ?? ''))];
}

/* A picture is what is said of it. */
function cellText(cell) {
  const picture = cell.querySelector('[role=img][aria-label]');
  if (picture) return picture.getAttribute('aria-label');
  const pieces = [];
  for (const node of cell.childNodes) pieces.push(node.textContent.replace(/\s+/g, ' ').trim());
  return pieces.filter(Boolean).join(' ').replaceAll('−', '-');
}

const csvField = (text) => /[",\n;]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
/* A text that a spreadsheet would take for a formula is quoted as text. */
const harmless = (text) => /^[=+@\t\r]|^-(?![\d.])/.test(text) && !/^[+-]?[\d.]/.test(text) ? `'${text}` : text;
const csvOf = (rows) => `\ufeff${rows.map((row) => row.map((text) => csvField(harmless(text))).join(',')).join('\r\n')}\r\n`;

function saveTable(table) {
  const name = table.caption.textContent.trim().toLowerCase().replace(/[^\p{L}\p{N}]+/gu, '-').replace(/^-+|-+$/g, '').slice(0, 60) || 'table';
  const address = URL.createObjectURL(new Blob([csvOf(tableRows(table))], { type: 'text/csv' }));
  el('a', { href: address, download: `${name}.csv` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

function furnish(table) {
  if (table.dataset.furnished || !table.caption?.querySelector('span')) return;
  table.dataset.furnished = 'true';
  const words = table.caption.textContent.trim();
  table.caption.querySelector('span').append(el('button', { type: 'button', class: 'csv', 'aria-label': `Save as csv: ${words}`, click: () => saveTable(table) }));
  const box = table.closest('.scroll');
  if (!box) return;
  if (!box.hasAttribute('tabindex')) {
    box.tabIndex = 0;
    box.setAttribute('role', 'region');
    box.setAttribute('aria-label', words);
  }
  const look = () => { box.toggleAttribute('data-more', box.scrollWidth - box.clientWidth - box.scrollLeft > 8); };
  box.addEventListener('scroll', look, { passive: true });
  new ResizeObserver(look).observe(box);
  new ResizeObserver(look).observe(table);
}

function startTables() {
  const all = () => document.querySelectorAll('main table').forEach(furnish);
  new MutationObserver(all).observe(document.querySelector('main'), { childList: true, subtree: true });
  all();
}
