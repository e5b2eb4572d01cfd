/* Before anything is drawn: the theme chosen last time, or the system's. */
try { document.documentElement.dataset.theme = localStorage.getItem('pf2lora-theme') || ''; } catch { /* no storage: the system's */ }
document.documentElement.classList.add('script');
