// Curves of losses, and the time line of GPUs, as SVG in the width that there is.

const CURVE = { width: 260, height: 88, left: 4, right: 4, top: 6, bottom: 16, levels: 1 };

function bounds(points) {
  let [low, high] = [Infinity, -Infinity];
  for (const [, loss] of points) {
    low = Math.min(low, loss);
    high = Math.max(high, loss);
  }
  return low === high ? [low - 0.5, high + 0.5] : [low, high];
}

// What a curve shows, for those who do not see it.
function curveWords({ points, evaluations }) {
  if (!points.length) return "no step yet";
  const words = `loss ${precise(points.at(-1)[1])} at step ${points.at(-1)[0]}, from ${precise(points[0][1])}`;
  const last = evaluations.at(-1);
  return last ? `${words}; validation loss ${precise(last[1])} at step ${last[0]}` : words;
}

// One job's losses over its steps; `size` may be another than the small one, with `levels` named.
function curve(own, size = CURVE) {
  const { width, height, left, right, top, bottom, levels } = { ...CURVE, ...size };
  const { points, evaluations } = own;
  const label = curveWords(own);
  const frame = { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label };
  if (points.length < 2) {
    return s("svg", { ...frame, viewBox: `0 0 ${width} 24` }, s("text", { x: 0, y: 16 }, label));
  }
  const all = [...points, ...evaluations];
  const [low, high] = bounds(all);
  const first = Math.min(points[0][0], evaluations[0]?.[0] ?? Infinity);
  const last = Math.max(points.at(-1)[0], evaluations.at(-1)?.[0] ?? 0);
  const x = (step) => left + ((step - first) / (last - first || 1)) * (width - left - right);
  const y = (loss) => top + ((high - loss) / (high - low)) * (height - top - bottom);
  const line = (of) => of.map(([step, loss]) => `${x(step).toFixed(1)} ${y(loss).toFixed(1)}`).join("L");
  const floor = height - bottom;
  const rules = Array.from({ length: levels }, (_, place) => {
    const loss = levels > 1 ? low + (place / (levels - 1)) * (high - low) : high;
    const at = levels > 1 ? { x: left - 6, y: y(loss) + 4 } : { x: width - right, y: top + 8 };
    return [
      levels > 1 ? s("line", { class: "rule", x1: left, x2: width - right, y1: y(loss), y2: y(loss) }) : null,
      s("text", { ...at, "text-anchor": "end" }, precise(loss)),
    ];
  });
  return s(
    "svg",
    frame,
    s("line", { class: "rule", x1: left, x2: width - right, y1: floor, y2: floor }),
    rules.flat(),
    s("path", { class: "area", d: `M${x(points[0][0])} ${floor}L${line(points)}L${x(points.at(-1)[0])} ${floor}Z` }),
    s("path", { class: "curve", d: `M${line(points)}` }),
    evaluations.length ? s("path", { class: "validation", d: `M${line(evaluations)}` }) : null,
    evaluations.map(([step, loss]) => s("circle", { class: "dot", cx: x(step), cy: y(loss), r: 2.5 })),
    s("text", { x: left, y: height - 4 }, `step ${count(first)}`),
    s("text", { x: width - right, y: height - 4, "text-anchor": "end" }, count(last)),
  );
}

const ROW = { height: 17, gap: 3, left: 46, bottom: 18 };
const MOST_ROWS = 96;

// Pieces of a gang's life between which the number of its jobs does not change.
function pieces(gang, end) {
  const marks = new Set([gang.since, gang.until ?? end]);
  for (const job of gang.jobs) marks.add(job.since).add(job.until ?? end);
  const times = [...marks].sort((a, b) => a - b);
  return times.slice(0, -1).map((from, place) => {
    const to = times[place + 1];
    const inside = gang.jobs.filter((job) => job.since <= from && (job.until ?? end) >= to);
    return { from, to, jobs: inside };
  });
}

function ticks(from, to, most) {
  const steps = [5, 10, 15, 30, 60, 120, 300, 600, 900];
  const step = steps.find((size) => (to - from) / size <= most) || 1800;
  const found = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) found.push(at);
  return found;
}

function timeline(gangs, width) {
  const end = now();
  const begin = Math.max(end - 1800, Math.min(end - 60, ...gangs.map((gang) => gang.since)));
  const places = [...new Set(gangs.flatMap((gang) => gang.gpus.map(([n, g]) => `${n}:${g}`)))];
  places.sort((a, b) => a.localeCompare(b, "en", { numeric: true })).splice(MOST_ROWS);
  const row = new Map(places.map((place, index) => [place, index]));
  const pitch = ROW.height + ROW.gap;
  const floor = places.length * pitch;
  const x = (at) =>
    ROW.left + ((Math.max(begin, at) - begin) / (end - begin)) * (width - ROW.left - 4);
  const words = `GPUs over the last ${duration(end - begin)}: ${many(gangs.length, "gang")}`;
  const picture = s("svg", {
    viewBox: `0 0 ${width} ${floor + ROW.bottom}`,
    width,
    height: floor + ROW.bottom,
    role: "img",
    "aria-label": words,
  });
  for (const at of ticks(begin, end, width / 90)) {
    const anchor = x(at) > width - 34 ? "end" : "middle";
    const text = s("text", { x: x(at), y: floor + 13, "text-anchor": anchor }, clock(at));
    picture.append(s("line", { class: "rule", x1: x(at), x2: x(at), y1: 0, y2: floor }), text);
  }
  for (const [place, index] of row) {
    picture.append(s("text", { x: 0, y: index * pitch + 13 }, `${place}`));
  }
  for (const gang of gangs) picture.append(drawGang(gang, end, x, row, pitch));
  return picture;
}

function drawGang(gang, end, x, row, pitch) {
  const all = s("g", { class: colour(gang.gang) });
  for (const { from, to, jobs } of pieces(gang, end)) {
    const [left, right] = [x(from), x(to)];
    if (right - left < 0.2) continue;
    const names = jobs.map((job) => job.name || job.id).join(", ") || "no job";
    for (const [node, gpu] of gang.gpus) {
      const index = row.get(`${node}:${gpu}`);
      if (index === undefined) continue;
      const y = index * pitch;
      const box = { x: left, y, width: right - left, height: ROW.height, rx: 2 };
      const strength = jobs.length ? 0.35 + 0.15 * Math.min(4, jobs.length) : undefined;
      const shape = s("rect", { ...box, class: jobs.length ? "work" : "hold", opacity: strength });
      shape.append(s("title", {}, `${gang.gang} on ${node}:${gpu}, ${clock(from)}: ${names}`));
      all.append(shape);
    }
  }
  return all;
}
