// Draws the JSON of runs and sweeps (llmx/observe/page/__init__.py says what a page is).
// Every value of a run becomes a text node or a number of a chart: nothing here writes HTML.
'use strict';

const COLOURS = ['#2f81c7', '#d9822b', '#3a9e6a', '#a15cc0', '#b3643f', '#d0567f', '#4aa6ad', '#8f8f3a'];
// Of lines: beside their colour, which not everybody sees. The pattern, and its sign in a legend.
const DASHES = [[undefined, '━'], [[9, 4], '╍'], [[4, 4], '┅'], [[2, 3], '┉']];
const GRAY = '#888888', RED = '#c9302c';
const LOG_FROM = 20;        // Largest by smallest value from which an axis is logarithmic by itself.
const SMOOTHED_FROM = 40;   // Points from which on a smoothed line helps.
const MAX_LEGEND = 24;
const LONGEST_NAME = 44;
// Of the table of runs: key of a row, head, class, and whether it is shown before anybody chooses.
const COLUMNS = [
  ['run', 'run', 'words', true], ['state', 'state', 'short', true], ['step', 'step', 'number', true], ['loss', 'loss', 'number', true],
  ['curve', 'curve', 'short', true], ['evaluation', 'evaluation', 'short', true], ['started', 'started', 'short', true], ['time', 'time', 'number', true],
  ['speed', 'tokens/s', 'number', true], ['tags', 'tags', 'words', false], ['hosts', 'hosts', 'short', false], ['name', 'name', 'words', false],
];

const options = { x: 'step', y: 'auto', smooth: 'auto', filter: '', group: true, sort: null, columns: columnsOfBrowser() };
const main = document.querySelector('main');
const embedded = JSON.parse(document.getElementById('data').textContent);
let state = {}, source = null, scheduled = false;
let sections = new Map();   // Title -> { json, node }: what has not changed stays, open and scrolled.
let charts = new Map();     // Title -> chart of the curves.
let chosen = new Set();     // Runs of the table that are ticked.

function el(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children.filter(child => child !== null && child !== undefined));
  return node;
}

function columnsOfBrowser() {
  // What this browser has chosen before; a page from disk may not ask for it.
  try { return new Set(JSON.parse(localStorage.columns)); } catch { return new Set(COLUMNS.filter(column => column[3]).map(([key]) => key)); }
}

// --- Data ------------------------------------------------------------------------------------

function merge(target, patch) {
  if (Array.isArray(target) && patch && patch.from !== undefined)
    return target.slice(0, patch.from).concat(patch.rest);
  if (patch === null || typeof patch !== 'object' || Array.isArray(patch)) return patch;
  // Without a prototype: a run may have any name.
  const merged = Object.assign(Object.create(null), Array.isArray(target) ? {} : target);
  for (const [key, value] of Object.entries(patch)) {
    if (value === null) delete merged[key];
    else merged[key] = merge(merged[key], value);
  }
  return merged;
}

function query() { return new URLSearchParams(location.hash.slice(1)); }

function connect() {
  if (source) source.close();
  const parameters = query();
  parameters.set('token', new URLSearchParams(location.search).get('token') || '');
  source = new EventSource(`events?${parameters}`);
  source.onopen = () => { state = {}; notice.textContent = ''; };
  source.onmessage = event => { state = merge(state, JSON.parse(event.data)); schedule(); };
  source.onerror = () => { notice.textContent = 'No connection to the server; trying again.'; };
}

function leave() {
  state = {}; sections = new Map(); chosen = new Set();
  for (const chart of charts.values()) chart.destroy();
  charts = new Map();
  main.replaceChildren(notice, el('p', { className: 'muted' }, 'Loading …'));
}

function schedule() {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(() => { scheduled = false; render(); });
}

// --- Page ------------------------------------------------------------------------------------

const notice = el('div', { className: 'notice' });

function render() {
  if (!state.title) return;
  document.title = state.title;
  const nodes = [notice];
  if (embedded.live && location.hash.length > 1) nodes.push(kept('back', '', () => el('a', { href: '#' }, '← all runs')));
  nodes.push(kept('title', [state.title, state.state], () => el('h1', { className: state.state }, state.title)));
  if (state.runs) nodes.push(...runsTable());
  for (const title of state.order || [])
    nodes.push(title === 'Curves' ? curvesSection() : section(title, state.sections[title]));
  if (state.logs) nodes.push(logSection());
  // A node that is put in again loses where it was scrolled to, and the focus.
  const focused = document.activeElement.dataset.keep, stays = new Set(nodes);
  for (const node of [...main.childNodes]) if (!stays.has(node)) node.remove();
  nodes.forEach((node, at) => { if (node !== main.childNodes[at]) main.insertBefore(node, main.childNodes[at] || null); });
  refocus(focused);
  for (const chart of charts.values()) chart.fit();
}

function refocus(name) {
  // What was drawn anew has the focus that its former node had.
  if (name && document.activeElement.dataset.keep !== name)
    document.querySelector(`[data-keep="${CSS.escape(name)}"]`)?.focus({ preventScroll: true });
}

function kept(key, value, make) {
  const json = JSON.stringify(value);
  const former = sections.get(key);
  if (former && former.json === json) return former.node;
  const node = make();
  if (former && node.tagName === 'DETAILS') node.open = former.node.open;
  sections.set(key, { json, node });
  return node;
}

function section(title, blocks) {
  return kept(`section ${title}`, blocks, () => {
    const node = state.folded.includes(title) ? folded(title) : el('section', {}, el('h2', {}, title));
    for (const block of blocks) {
      const [kind] = Object.keys(block);
      node.append(BLOCKS[kind](block[kind]));
    }
    return node;
  });
}

function folded(title, ...children) {
  return el('details', { className: 'section' }, el('summary', {}, el('h2', {}, title)), ...children);
}

const BLOCKS = {
  tiles: rows => el('div', { className: 'tiles' }, ...rows.map(([name, value, note]) =>
    el('div', { className: value.length > 30 ? 'wide' : '' }, el('div', { className: 'muted' }, name), el('strong', {}, value), el('small', { className: 'muted' }, note)))),
  text: text => el('p', {}, text),
  heading: text => el('h3', {}, text),
  code: text => el('pre', {}, text),
  list: texts => el('ul', {}, ...texts.map(text => el('li', {}, text))),
  fold: ({ title, code }) => el('details', {}, el('summary', {}, title), el('pre', {}, code)),
  table: drawTable,
  bars: drawBars,
  trials: drawTrials,
  charts: specs => {
    const node = el('div', { className: 'charts' });
    for (const spec of specs) {
      const chart = new Chart(spec.title, false);
      node.append(chart.node);
      chart.draw({ ...spec, series: spec.series.map(s => ({ ...s, colour: COLOURS[s.colour], dash: s.colour % DASHES.length })) });
    }
    return node;
  },
};

function link(href, text) {
  const node = el('a', { href }, text);
  node.dataset.keep = href;
  return node;
}

function cell(value) {
  // A link within the page, or to a file beside it: never to another scheme.
  if (typeof value === 'string') return value;
  return /^[a-z]*:/i.test(value.href) ? value.text : link(value.href, value.text);
}

function drawTable({ rows, kinds, heads, best }) {
  const table = el('table');
  if (heads.length)
    table.append(el('thead', {}, el('tr', {}, ...heads.map((head, at) => el('th', { className: kinds[at] }, head)))));
  table.append(el('tbody', {}, ...rows.map((row, number) => el('tr', { className: number === best ? 'best' : '' },
    ...row.map((value, at) => el('td', { className: kinds[at] }, cell(value)))))));
  return el('div', { className: 'scroll' }, table);
}

function drawBars({ parts, rows, unit }) {
  const total = ([, ...values]) => values.reduce((sum, value) => sum + value, 0);
  const longest = Math.max(...rows.map(total));
  const grid = el('div', { className: 'bars' }), colours = parts.map((name, at) => name === 'waits' ? '#88888855' : COLOURS[at]);
  for (const row of rows) {
    const [name, ...values] = row;
    const bar = el('div', { className: 'bar' }, ...values.map((value, at) => {
      const part = el('span', { title: `${parts[at]} ${shown(value)} ${unit}` });
      part.style.flexGrow = value;
      part.style.background = colours[at];
      return part;
    }));
    bar.style.width = `${100 * total(row) / longest}%`;
    grid.append(el('span', {}, name), bar);
  }
  const names = parts.map((name, at) => [name, colours[at], '■']);
  return el('div', {}, legend(names), grid);
}

function legend(names) {
  return el('p', { className: 'legend' }, ...names.map(([name, colour, sign]) => {
    const mark = el('span', {}, sign);
    mark.style.color = colour;
    mark.style.margin = '0 .3em 0 0';
    return el('span', {}, mark, name);
  }));
}

function choice(label, name, values) {
  const select = el('select', {}, ...Object.entries(values).map(([value, text]) =>
    el('option', { value, selected: options[name] === value }, text)));
  select.addEventListener('change', () => { options[name] = select.value; render(); });
  return el('label', {}, `${label} `, select);
}

// --- The table of runs -----------------------------------------------------------------------

function runsTable() {
  const ids = state.order_of_runs.filter(id => state.runs[id]);
  const hasSweeps = ids.some(id => state.runs[id].sweep);
  // A list has the text of a cell and the value that sorts it.
  const text = (id, key) => key === 'run' ? id : Array.isArray(state.runs[id][key]) ? state.runs[id][key][0] : state.runs[id][key];
  const value = (id, key) => Array.isArray(state.runs[id][key]) ? state.runs[id][key][1] : text(id, key);
  const hasValue = ([key]) => key === 'curve' || ids.some(id => text(id, key));
  const controls = kept('controls of runs', hasSweeps, () => {
    const filter = el('input', { type: 'search', placeholder: 'filter: name, state, host, tag', value: options.filter });
    filter.setAttribute('aria-label', 'filter');
    filter.addEventListener('input', () => { options.filter = filter.value; render(); });
    const group = el('input', { type: 'checkbox', checked: options.group });
    group.addEventListener('change', () => { options.group = group.checked; render(); });
    const compare = el('button', { type: 'button' }, 'Show ticked runs together');
    compare.addEventListener('click', () => {
      location.hash = new URLSearchParams([...chosen].map(id => ['run', id])).toString();
    });
    const columns = COLUMNS.slice(1).map(([key, head]) => {
      const box = el('input', { type: 'checkbox', checked: options.columns.has(key) });
      box.addEventListener('change', () => {
        if (box.checked) options.columns.add(key); else options.columns.delete(key);
        render();
        localStorage.columns = JSON.stringify([...options.columns]);
      });
      return el('label', {}, box, ` ${head}`);
    });
    return el('div', { className: 'controls' }, filter,
      hasSweeps ? el('label', {}, group, ' group by sweep') : null, compare,
      el('details', {}, el('summary', {}, 'Columns'), el('div', { className: 'controls' }, ...columns)));
  });
  const words = options.filter.toLowerCase().split(/\s+/).filter(Boolean);
  const matches = id => {
    const texts = [id, ...Object.entries(state.runs[id]).map(([key, cell]) => key === 'curve' ? '' : cell)].join(' ').toLowerCase();
    return words.every(word => texts.includes(word));
  };
  let listed = ids.filter(matches);
  if (options.sort) {
    const { key, sign } = options.sort, isMissing = v => v === null || v === undefined || v === '';
    const order = (a, b) => isMissing(a) || isMissing(b) ? isMissing(a) - isMissing(b) : sign * (typeof a === 'string' ? a.localeCompare(b, 'en', { numeric: true }) : a - b);
    listed.sort((a, b) => order(value(a, key), value(b, key)));
  }
  if (options.group && hasSweeps) {
    const first = new Map();
    listed.forEach((id, at) => { const s = state.runs[id].sweep; if (s && !first.has(s)) first.set(s, at); });
    const place = (id, at) => { const s = state.runs[id].sweep; return s ? first.get(s) : at; };
    const places = new Map(listed.map((id, at) => [id, place(id, at)]));
    listed = listed.map((id, at) => [id, at]).sort((a, b) => places.get(a[0]) - places.get(b[0]) || a[1] - b[1]).map(([id]) => id);
  }
  const columns = COLUMNS.filter(column => (column[0] === 'run' || options.columns.has(column[0])) && hasValue(column));
  const table = kept('table of runs', [listed.map(id => state.runs[id]), listed, options.group, options.sort, columns], () => {
    const body = el('tbody');
    let former = null;
    for (const id of listed) {
      const run = state.runs[id], isGrouped = options.group && hasSweeps;
      if (isGrouped && run.sweep !== former) {
        const title = run.sweep ? link(`#${new URLSearchParams({ sweep: run.sweep })}`, `sweep ${run.sweep}`) : 'other runs';
        if (run.sweep || former !== null) body.append(el('tr', { className: 'group' }, el('td', { colSpan: columns.length + 1 }, title)));
        former = run.sweep;
      }
      const box = el('input', { type: 'checkbox', checked: chosen.has(id) });
      box.setAttribute('aria-label', `tick ${id}`);
      box.dataset.keep = `tick ${id}`;
      box.addEventListener('change', () => { if (box.checked) chosen.add(id); else chosen.delete(id); });
      const cellOf = key => key === 'run' ? nameOfRun(id, run, isGrouped) : key === 'curve' ? smallCurve(run.curve) : text(id, key);
      body.append(el('tr', { className: 'run' }, el('td', {}, box), ...columns.map(([key, , kind]) =>
        el('td', { className: `${kind} of-${key} ${key === 'state' ? run.state : ''}` }, cellOf(key)))));
    }
    return el('div', { className: 'scroll' }, el('table', { className: 'runs' },
      el('thead', {}, el('tr', {}, el('th'), ...columns.map(headOfColumn))), body));
  });
  return [controls, table];
}

function nameOfRun(id, run, isGrouped) {
  const name = isGrouped && run.sweep ? id.slice(run.sweep.length + 1) : id, half = LONGEST_NAME / 2;
  const node = link(`#${new URLSearchParams({ run: id })}`, name.length > LONGEST_NAME ? `${name.slice(0, half)}…${name.slice(1 - half)}` : name);
  node.title = id;
  return el('div', {}, node, run.why ? el('div', { className: 'why', title: run.why }, run.why) : null);
}

function headOfColumn([key, head, kind]) {
  const isSorted = options.sort && options.sort.key === key, sign = isSorted ? options.sort.sign : 0;
  const button = el('button', { type: 'button' }, `${head}${{ 1: ' ▲', '-1': ' ▼', 0: '' }[sign]}`);
  button.dataset.keep = `sort ${key}`;
  // A click sorts upwards, the next one downwards, the third as before.
  button.addEventListener('click', () => { options.sort = sign < 0 ? null : { key, sign: sign ? -1 : 1 }; render(); });
  const node = el('th', { className: `${kind} of-${key}` }, key === 'curve' ? head : button);
  if (sign) node.ariaSort = sign > 0 ? 'ascending' : 'descending';
  return node;
}

function smallCurve(points) {
  const known = points.filter(point => point[1] !== null), width = 80, height = 22;
  if (known.length < 2) return '';
  const place = scale(known.map(point => point[1])), first = known[0][0], last = known.at(-1)[0];
  const places = known.map(([step, loss]) => [width * (step - first) / (last - first || 1), 1 + (height - 2) * (1 - place(loss))].map(x => x.toFixed(1)));
  return svg('svg', { width, height, 'aria-hidden': true }, svg('polyline', { points: places.join(' '), fill: 'none', stroke: COLOURS[0], 'stroke-width': 1.5 }));
}

function moveInTable(event) {
  // j and k go from run to run, and so do the arrow keys where a run has the focus.
  const step = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1 }[event.key], { target } = event;
  const isTyping = /^(INPUT|SELECT)$/.test(target.tagName) && target.type !== 'checkbox';
  if (!step || isTyping || event.ctrlKey || event.altKey || event.metaKey) return;
  const rows = [...main.querySelectorAll('tr.run')], at = rows.indexOf(target.closest('tr'));
  if (at < 0 && event.key.startsWith('Arrow')) return;
  const row = at < 0 ? rows[0] : rows[at + step];
  if (!row) return;
  row.querySelector(target.type === 'checkbox' ? 'input' : 'a').focus();
  event.preventDefault();
}

function logSection() {
  const selected = query().get('log') || '';
  const node = kept('log', [state.logs, selected], () => {
    const select = el('select', {}, el('option', { value: '' }, 'choose a log'),
      ...state.logs.map(name => el('option', { value: name, selected: name === selected }, name)));
    select.setAttribute('aria-label', 'log');
    select.addEventListener('change', () => {
      const parameters = query();
      parameters.set('log', select.value);
      history.replaceState(null, '', `#${parameters}`);
      connect();
    });
    const details = folded('Logs', el('div', { className: 'controls' }, select), el('pre', { className: 'log', hidden: true }));
    details.open = Boolean(selected);
    return details;
  });
  const log = node.querySelector('pre');
  log.hidden = !state.log;
  if (log.textContent !== (state.log || '')) {
    log.textContent = state.log || '';
    requestAnimationFrame(() => { log.scrollTop = log.scrollHeight; });
  }
  return node;
}

// --- Curves ----------------------------------------------------------------------------------

function curvesSection() {
  const runs = Object.entries(state.curves);
  const hasTime = runs.every(([, run]) => run.train && run.train.time);
  const node = kept('curves', hasTime, () => el('section', {},
    el('div', { className: 'controls' }, el('h2', {}, 'Curves'),
      hasTime ? choice('over', 'x', { step: 'optimizer steps', time: 'hours since the start' }) : null,
      choice('values', 'y', { auto: 'linear or logarithmic', linear: 'linear', log: 'logarithmic' }),
      choice('smoothing', 'smooth', { auto: 'where it helps', 0: 'none', 60: '1/30 of the run', 12: '1/6 of the run' })),
    el('div', { className: 'charts' })));
  const grid = node.querySelector('.charts');
  const specs = curveSpecs(runs, hasTime);
  const titles = new Set(specs.map(spec => spec.title));
  for (const [title, chart] of charts)
    if (!titles.has(title)) { chart.destroy(); chart.node.remove(); charts.delete(title); }
  specs.forEach((spec, at) => {
    if (!charts.has(spec.title)) charts.set(spec.title, new Chart(spec.title, spec.large));
    const chart = charts.get(spec.title);
    if (grid.children[at] !== chart.node) grid.insertBefore(chart.node, grid.children[at] || null);
    chart.draw(spec);
  });
  return node;
}

function curveSpecs(runs, hasTime) {
  const axis = hasTime ? options.x : 'step';
  const xs = columns => axis === 'time' ? columns.time.map(seconds => seconds / 3600) : columns.step;
  const several = runs.length > 1;
  const hasBest = runs.some(([, run]) => run.best);
  const colourOf = at => runs.length <= COLOURS.length || !hasBest ? COLOURS[at % COLOURS.length] : runs[at][1].best ? COLOURS[0] : GRAY;
  const titles = new Set(runs.map(([, run]) => run.title || 'loss')), [title] = titles.size === 1 ? titles : ['loss'];
  const loss = { title: title.replace('loss', 'Loss'), large: true, series: [], marks: [], time: axis === 'time' };
  const others = new Map();
  runs.forEach(([name, run], at) => {
    const colour = colourOf(at), faint = hasBest && several && !run.best;
    const dash = !several || run.best ? 0 : hasBest ? (runs.length > COLOURS.length ? 0 : 1 + at % 3) : (at + Math.floor(at / COLOURS.length)) % DASHES.length;
    const { train, eval: evals } = run;
    const add = (spec, title, columns, values, kind, own) => {
      if (values) spec.series.push({ name: title, x: xs(columns), y: values, kind, colour: own || colour, dash });
    };
    if (train && train.loss) {
      const smooth = smoothing(train.loss);
      const mean = options.smooth === 'auto' && train.loss_mean;
      const bold = mean ? train.loss_mean : smooth;
      if (!several && bold) add(loss, mean ? 'train, each logged step' : '', train, train.loss, 'faint');
      add(loss, several ? name : mean ? 'mean since the previous line' : smooth ? 'train, smoothed' : 'train', train, bold || train.loss, faint ? 'faint' : 'line');
    }
    // A line through two points (before and after) would look like a measured curve.
    if (evals && evals.loss) add(loss, several ? '' : 'evaluation', evals, evals.loss, evals.loss.length > 2 ? 'line dots' : 'dots', several ? null : COLOURS[1]);
    if (!several && axis === 'step')
      for (const [title, steps] of Object.entries(run.marks || {}))
        loss.marks.push({ name: title, x: steps, ...(title === 'resumed' ? { colour: GRAY, dash: [6, 6], sign: '┆' } : { colour: RED, dash: [2, 3], sign: '┊' }) });
    for (const { title, kind, name: key } of run.charts || []) {
      if (!others.has(title)) others.set(title, { title, series: [], marks: [], time: axis === 'time', unnamed: true });
      const values = run[kind][key];
      const smooth = kind === 'train' && key !== 'lr' && options.smooth !== 'auto' ? smoothing(values) : null;
      add(others.get(title), name, run[kind], smooth || values, 'line', several ? null : kind === 'eval' ? COLOURS[1] : null);
    }
  });
  // The best lies over the others.
  loss.series.sort((a, b) => (a.kind !== 'faint') - (b.kind !== 'faint'));
  return [loss, ...others.values()].filter(spec => spec.series.length);
}

function smoothing(values) {
  // The mean around each value: no lag behind the curve. Null where there is nothing to smooth.
  const part = options.smooth === 'auto' ? (values.length >= SMOOTHED_FROM ? 60 : 0) : Number(options.smooth);
  const half = part ? Math.max(1, Math.floor(values.length / part)) : 0;
  if (!half) return null;
  const sums = [0], counts = [0];
  values.forEach((value, at) => {
    sums.push(sums[at] + (value === null ? 0 : value));
    counts.push(counts[at] + (value === null ? 0 : 1));
  });
  return values.map((value, at) => {
    const reach = Math.min(half, at, values.length - 1 - at);
    const count = counts[at + reach + 1] - counts[at - reach];
    return value === null || !count ? null : (sums[at + reach + 1] - sums[at - reach]) / count;
  });
}

// --- A chart ---------------------------------------------------------------------------------

const plain = new Intl.NumberFormat('en', { maximumSignificantDigits: 4 });
const exact = new Intl.NumberFormat('en', { maximumSignificantDigits: 7 });
const short = new Intl.NumberFormat('en', { notation: 'compact', maximumSignificantDigits: 3 });

function shown(value) {
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e9)) return value.toExponential(size >= 1e9 || Number.isInteger(Math.log10(size)) ? 1 : 2).replace(/\.0+e/, 'e');
  return size >= 1e4 ? short.format(value) : plain.format(value);
}

function labels(values) {
  // In few digits, or in as many as tell them apart.
  const texts = values.map(value => value === null || value === undefined ? '' : shown(value));
  const distinct = texts.filter(Boolean);
  return new Set(distinct).size === distinct.length ? texts : values.map(value => value === null ? '' : exact.format(value));
}

function isDecade(value) { return Math.abs(Math.log10(value) - Math.round(Math.log10(value))) < 1e-9; }

function spread(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) if (value !== null && value !== undefined) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

class Chart {
  constructor(title, large) {
    this.height = large ? 330 : 150;
    this.legend = el('div');
    this.readout = el('div', { className: 'readout' });
    this.holder = el('div');
    this.node = el('div', { className: large ? 'chart large' : 'chart' }, el('h3', {}, title), this.legend, this.holder, this.readout);
    this.plot = null;
    this.observer = new ResizeObserver(() => this.fit());
    this.observer.observe(this.holder);
  }

  destroy() {
    this.observer.disconnect();
    if (this.plot) this.plot.destroy();
    this.plot = null;
  }

  fit() {
    const width = this.holder.clientWidth;
    if (!this.plot && this.pending && width) this.make(width);
    else if (this.plot && width && width !== this.plot.width) this.plot.setSize({ width, height: this.height });
  }

  draw(spec) {
    const series = spec.series.filter(one => one.y.some(value => value !== null));
    const values = spread(series.map(one => spread(one.y)).flat().filter(Number.isFinite));
    const asked = options.y !== 'auto' && !spec.names;
    const log = values[0] > 0 && (asked ? options.y === 'log' : values[1] / values[0] >= LOG_FROM);
    const places = spread(series.map(one => spread(one.x)).flat());
    const logX = Boolean(spec.names) && !spec.names.length && places[0] > 0 && places[1] / places[0] >= LOG_FROM;
    const data = uPlot.join(series.map(one => [one.x, one.y]));
    const looks = JSON.stringify([series.map(one => [one.name, one.kind, one.colour, one.dash, one.y.length > 1]), (spec.marks || []).map(mark => mark.name), log, logX, spec.time, spec.names]);
    this.pending = { ...spec, series, data, log, logX };
    this.marks = spec.marks || [];
    if (this.plot && this.looks === looks) this.plot.setData(data);
    else {
      if (this.plot) this.plot.destroy();
      this.plot = null;
      this.looks = looks;
      const named = [...series.filter(one => one.name).map(one => [one.name, one.colour, one.kind === 'faint' && !one.dash ? '─' : (one.kind.includes('dots') ? '●' : '') + (one.kind === 'dots' ? '' : DASHES[one.dash || 0][1])]),
        ...this.marks.map(mark => [mark.name, mark.colour, mark.sign])];
      const more = !spec.unnamed && named.length > MAX_LEGEND;
      this.legend.replaceChildren(...(!spec.unnamed && (series.length > 1 || this.marks.length) ? [legend(named.slice(0, MAX_LEGEND))] : []),
        ...(more ? [el('p', { className: 'muted' }, `and ${named.length - MAX_LEGEND} more: point at a line to see its name`)] : []));
      this.fit();
    }
  }

  make(width) {
    const { series, data, log, logX, time, names } = this.pending;
    const ink = () => getComputedStyle(document.body).color;
    const grid = { stroke: '#88888833', width: 1 };
    const font = '12px system-ui, sans-serif';
    const everyName = names && names.length ? Math.ceil(names.length * Math.max(...names.map(name => name.length)) * 8 / (width - 60)) : 1;
    const axisX = { stroke: ink, size: 32, grid: { show: false }, ticks: grid, font, values: (plot, splits) => labels(splits) };
    if (names && names.length)
      Object.assign(axisX, { splits: names.map((_, at) => at), values: (plot, splits) => splits.map(at => at % everyName ? '' : names[at]) });
    else if (!names && !time) axisX.incrs = [1, 2, 5].flatMap(n => [...Array(12).keys()].map(power => n * 10 ** power)).sort((a, b) => a - b);
    this.plot = new uPlot({
      width, height: this.height, legend: { show: false },
      cursor: { drag: { x: true, y: false }, focus: { prox: 30 }, points: { size: 6 } },
      focus: { alpha: series.length > 8 ? 0.3 : 1 },
      scales: {
        x: { time: false, distr: logX ? 3 : 1, ...(names && names.length ? { range: [-0.5, names.length - 0.5] } : {}) },
        y: log ? { distr: 3 } : { range: (plot, low, high) => low === null ? [0, 1] : low >= 0 && low < high / 2 ? [0, high * 1.05] : uPlot.rangeNum(low, high, 0.1, true) },
      },
      axes: [axisX, { stroke: ink, grid: { ...grid, filter: (plot, splits) => splits.map(value => log && !isDecade(value) ? null : value) }, ticks: { show: false }, font, size: 62, values: (plot, splits) => labels(splits) }],
      series: [{}, ...series.map(one => ({
        label: one.name || ' ',  // Of an empty one uPlot makes "Value".
        stroke: one.kind === 'faint' ? `${one.colour}66` : one.colour,
        width: one.kind === 'faint' ? 1 : 2,
        dash: DASHES[one.dash || 0][0],
        paths: one.kind === 'dots' ? () => null : undefined,
        points: { show: one.kind.includes('dots') || one.y.length === 1, size: 7, fill: one.colour },
      }))],
      hooks: {
        draw: [plot => this.drawMarks(plot)],
        setCursor: [plot => this.read(plot)],
        setSeries: [(plot, at) => { this.focused = at; this.read(plot); }],
      },
    }, data, this.holder);
  }

  drawMarks(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    for (const mark of this.marks) {
      ctx.setLineDash(mark.dash);
      ctx.strokeStyle = mark.colour;
      for (const x of mark.x) {
        const at = plot.valToPos(x, 'x', true);
        if (at < bbox.left || at > bbox.left + bbox.width) continue;
        ctx.beginPath();
        ctx.moveTo(at, bbox.top);
        ctx.lineTo(at, bbox.top + bbox.height);
        ctx.stroke();
      }
    }
    ctx.restore();
  }

  read(plot) {
    const { idx } = plot.cursor, { names, time } = this.pending;
    if (idx === null || idx === undefined) { this.readout.textContent = ''; return; }
    const x = plot.data[0][idx];
    const place = names && names.length ? names[x] : time ? `${plain.format(x)} h` : names ? shown(x) : `step ${exact.format(x)}`;
    const parts = plot.series.map((one, at) => [one, plot.data[at][idx], at]).slice(1)
      .filter(([, value, at]) => value !== null && value !== undefined && (plot.series.length < 6 || at === this.focused))
      .map(([one, value]) => `${one.label} ${plain.format(value)}`.trim());
    this.readout.textContent = [place, ...parts].join('   ');
  }
}

// --- Start -----------------------------------------------------------------------------------

matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => {
  for (const chart of charts.values()) if (chart.plot) chart.plot.redraw();
});
addEventListener('keydown', moveInTable);
if (embedded.live) {
  addEventListener('hashchange', () => { leave(); connect(); });
  // Nothing is read for a page that nobody sees.
  document.addEventListener('visibilitychange', () => {
    if (document.hidden && source) source.close();
    else if (!document.hidden) connect();
  });
  leave();
  connect();
} else {
  state = merge({}, embedded);
  render();
}
