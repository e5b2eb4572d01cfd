/* Start: read the data, fill each view's place, the theme button. */

const VIEWS = { curves: curvesView, tradeoff: tradeoffView, shares: sharesView, clients: clientsView, choices: choicesView, ranks: ranksView, examples: examplesView, errors: errorsView };

function startTheme() {
  const root = document.documentElement;
  const button = document.getElementById('theme');
  const dark = () => root.dataset.theme ? root.dataset.theme === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
  const label = () => { button.textContent = dark() ? 'Light' : 'Dark'; button.setAttribute('aria-label', `Switch to the ${dark() ? 'light' : 'dark'} theme`); };
  button.addEventListener('click', () => {
    root.dataset.theme = dark() ? 'light' : 'dark';
    try { localStorage.setItem('pf2lora-theme', root.dataset.theme); } catch { /* chosen for this visit only */ }
    label();
  });
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', label);
  label();
}

function startDataSwitch() {
  for (const input of document.querySelectorAll('[name=data-scale]')) {
    input.addEventListener('change', () => document.querySelector('.data-bars').classList.toggle('shares', input.value === 'shares'));
  }
}

const data = JSON.parse(document.getElementById('report-data').textContent);
startTips();
startTheme();
startDataSwitch();
if (many(data.series)) showOnly(data.series, bestOf(data, BEST));
for (const host of document.querySelectorAll('[data-view]')) VIEWS[host.dataset.view](host, data);
startTables();
document.documentElement.dataset.ready = 'true';
