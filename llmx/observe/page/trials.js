'use strict';
// The trials of a sweep as a heat map of two keys and as parallel coordinates of all, for a metric
// that is chosen. Of neither is a colour the only carrier: each cell has its number, and a line its
// place. In one script with app.js, whose functions it uses.

const chosenOfTrials = {};  // Names of the keys and the metric that are shown.

function svg(tag, attributes, ...children) {
  const node = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function drawTrials(data) {
  const { keys, metrics } = data;
  const named = (list, name, initial) => list.find(item => item.name === name) || initial;
  const controls = el('div', { className: 'controls' });
  const map = el('div', { className: 'scroll' }), lines = el('div'), note = el('p', { className: 'muted' });
  const draw = () => {
    const metric = named(metrics, chosenOfTrials.metric, metrics[data.objective]);
    const x = named(keys, chosenOfTrials.x, keys[0]);
    const y = named(keys.filter(key => key !== x), chosenOfTrials.y, keys.find(key => key !== x));
    const choices = [['metric', 'metric', metrics, metric], ['columns', 'x', keys, x], ['rows', 'y', keys.filter(key => key !== x), y]];
    if (controls.childNodes.length) chosenOfTrials.y = y.name;
    const focused = document.activeElement.dataset.keep;
    controls.replaceChildren(...choices.map(([label, name, list, item]) => {
      const select = el('select', {}, ...list.map(other => el('option', { selected: other === item }, other.name)));
      select.dataset.keep = `trials ${name}`;
      select.addEventListener('change', () => { chosenOfTrials[name] = list[select.selectedIndex].name; draw(); });
      return el('label', {}, `${label} `, select);
    }));
    refocus(focused);
    const direction = { 1: 'more is better (*)', '-1': 'less is better (*)', 0: 'neither direction is better' }[metric.better];
    note.textContent = `${metric.name}: the median of the trials of a cell; ${direction}. The ${metric.better < 0 ? 'least' : 'largest'} has the strongest colour.`;
    map.replaceChildren(heatMap(data.trials, x, y, metric));
    lines.replaceChildren(parallelCoordinates(data, metric));
  };
  draw();
  return el('div', {}, controls, note, map, lines);
}

function median(values) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b), half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

function scale(values) {
  // From the values to 0 to 1: linear, or logarithmic where they differ much.
  const [low, high] = spread(values);
  if (!(high > low)) return () => 0.5;
  if (low > 0 && high / low >= LOG_FROM) return value => Math.log(value / low) / Math.log(high / low);
  return value => (value - low) / (high - low);
}

function heatMap(trials, x, y, metric) {
  const cells = y.labels.map(() => x.labels.map(() => ({ values: [], words: new Set() })));
  trials.forEach((trial, at) => {
    if (x.of[at] === null || y.of[at] === null) return;
    const cell = cells[y.groups[y.of[at]]][x.groups[x.of[at]]];
    if (metric.values[at] === null) cell.words.add(trial.word);
    else cell.values.push(metric.values[at]);
  });
  const medians = cells.map(row => row.map(cell => median(cell.values)));
  const texts = labels(medians.flat()), [low, high] = spread(medians.flat());
  const place = scale(medians.flat()), best = metric.better > 0 ? high : low;
  const body = cells.map((row, atY) => el('tr', {}, el('th', { scope: 'row', className: 'name' }, y.labels[atY]), ...row.map((cell, atX) => {
    const value = medians[atY][atX];
    if (value === null) return el('td', { className: 'number muted' }, [...cell.words].join(', ') || '–');
    const isBest = metric.better && high > low && value === best;
    const node = el('td', { className: 'number', title: `median of ${cell.values.length}` },
      `${isBest ? '* ' : ''}${texts[atY * x.labels.length + atX]}`, cell.values.length > 1 ? el('small', {}, ` of ${cell.values.length}`) : null);
    const part = metric.better < 0 ? 1 - place(value) : place(value);
    node.style.background = `rgba(47, 129, 199, ${(0.05 + 0.5 * part).toFixed(2)})`;
    return node;
  })));
  return el('table', { className: 'heat' },
    el('thead', {}, el('tr', {}, el('th', {}, `${y.name} ↓  ${x.name} →`), ...x.labels.map(label => el('th', { scope: 'col', className: 'number' }, label)))),
    el('tbody', {}, ...body));
}

function axisOfKey(key) {
  const isNumeric = key.sizes.length > 0, numbers = isNumeric ? key.sizes : key.values.map((_, at) => at);
  const place = scale(numbers), last = key.values.length - 1;
  const isFew = last < 8;
  return { name: key.name, places: key.of.map(at => at === null ? null : place(numbers[at])),
    ticks: key.values.map((text, at) => [place(numbers[at]), text]).filter((_, at) => isFew || at === 0 || at === last) };
}

function axisOfMetric({ name, values }) {
  const finite = values.filter(value => value !== null), place = scale(finite);
  const ends = [...new Set(spread(finite))].filter(Number.isFinite);
  return { name, places: values.map(value => value === null ? null : place(value)), ticks: ends.map(value => [place(value), shown(value)]) };
}

function parallelCoordinates({ keys, trials, best }, metric) {
  const axes = [...keys.map(axisOfKey), axisOfMetric(metric)];
  const gap = Math.max(120, Math.min(260, 1060 / (axes.length - 1))), left = 16, top = 34, height = 220;
  const xOf = at => left + gap * at, yOf = place => top + height * (1 - place);
  const width = xOf(axes.length - 1) + 110;
  const readout = el('p', { className: 'muted' }, 'Point at a line, or focus the picture and use the arrow keys: it is named here.');
  readout.setAttribute('aria-live', 'polite');
  const picture = svg('svg', { width, height: height + top + 20, tabindex: 0, role: 'img', 'data-keep': 'trials lines',
    'aria-label': `Parallel coordinates: ${axes.map(axis => axis.name).join(', ')}. Arrow keys go from trial to trial.` });
  const drawn = trials.map((trial, number) => {
    const points = axes.map((axis, at) => axis.places[number] === null ? null : [xOf(at), yOf(axis.places[number])]).filter(Boolean);
    const isKnown = metric.values[number] !== null;
    const line = svg('polyline', { points: points.join(' '), fill: 'none', 'stroke-opacity': isKnown ? 0.7 : 0.8,
      stroke: number === best ? COLOURS[1] : isKnown ? COLOURS[0] : GRAY, 'stroke-width': number === best ? 3 : 1.2, ...(isKnown ? {} : { 'stroke-dasharray': '3 4' }) });
    return { trial, number, points, line, value: metric.values[number] };
  });
  picture.append(...drawn.filter(one => one.number !== best).map(one => one.line), ...drawn.filter(one => one.number === best).map(one => one.line));
  axes.forEach((axis, at) => {
    picture.append(svg('line', { x1: xOf(at), x2: xOf(at), y1: top, y2: top + height, stroke: 'currentColor', 'stroke-opacity': 0.5 }));
    const longest = Math.floor(gap / 7.5);
    const title = axis.name.length > longest ? `…${axis.name.slice(1 - longest)}` : axis.name;
    picture.append(svg('text', { x: xOf(at) - 6, y: 16, 'font-weight': 600 }, title, svg('title', {}, axis.name)));
    let above = Infinity;
    for (const [place, text] of [...axis.ticks].sort((a, b) => a[0] - b[0])) {
      // Where two would lie over each other, the lower one is written.
      if (above - yOf(place) < 13) continue;
      above = yOf(place);
      picture.append(svg('text', { x: xOf(at) + 6, y: above + 4 }, text));
    }
  });
  const marker = svg('polyline', { fill: 'none', stroke: 'currentColor', 'stroke-width': 3 });
  picture.append(marker);
  // Those with a value from the best, then the others.
  const order = [...drawn].sort((a, b) => (a.value === null) - (b.value === null) || (metric.better > 0 ? b.value - a.value : a.value - b.value));
  let current = -1;
  const select = at => {
    current = Math.max(0, Math.min(order.length - 1, at));
    const { trial, points, value } = order[current];
    marker.setAttribute('points', points.join(' '));
    readout.textContent = `${trial.name}: ${value === null ? trial.word : `${metric.name} ${shown(value)}`}`;
  };
  picture.addEventListener('keydown', event => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (step) { select(current + step); event.preventDefault(); }
  });
  picture.addEventListener('mousemove', event => {
    const box = picture.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    const distance = ({ points }) => {
      const after = points.findIndex(point => point[0] >= x);
      if (after < 1) return points.length && after === 0 ? Math.abs(points[0][1] - y) : Infinity;
      const [[x0, y0], [x1, y1]] = [points[after - 1], points[after]];
      return Math.abs(y0 + (y1 - y0) * (x - x0) / (x1 - x0) - y);
    };
    const distances = order.map(distance), nearest = Math.min(...distances);
    if (nearest < 12) select(distances.indexOf(nearest));
  });
  const names = [['best', COLOURS[1], '━'], ['others', COLOURS[0], '─'], ['without a value', GRAY, '┄']];
  return el('div', {}, legend(names.filter((_, at) => [best !== null, true, drawn.some(one => one.value === null)][at])),
    el('div', { className: 'scroll' }, picture), readout);
}
