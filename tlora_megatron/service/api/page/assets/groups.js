// Gangs with their members: who trains beside whom, how fast, and how far from its bound.

function layoutWords(group) {
  const { tp = 1, pp = 1, dp = 1 } = group.layout;
  const parts = [["TP", tp], ["PP", pp], ["DP", dp]].filter(([, size]) => size > 1);
  return parts.map(([name, size]) => `${name}${size}`).join(" ") || "one process";
}

function meter(member) {
  if (member.driven) return h("small", {}, "driven by its client");
  const measured = isNumber(member.slowdown);
  const value = measured ? member.slowdown : member.predicted_slowdown;
  if (!isNumber(value)) return h("small", {}, "slowdown not known yet");
  const share = Math.min(1, Math.max(0.02, (value - 1) / Math.max(1e-6, member.bound - 1)));
  const over = value > member.bound * 1.02;
  const bar = h("i", {});
  bar.style.width = `${100 * share}%`;
  const words = `slowdown ${value.toFixed(2)} of ${member.bound}`;
  return h(
    "div",
    {},
    h(
      "span",
      {
        class: `meter${measured ? "" : " guess"}${over ? " over" : ""}`,
        role: "meter",
        "aria-label": "slowdown against its bound",
        "aria-valuemin": 1,
        "aria-valuemax": member.bound,
        "aria-valuenow": value.toFixed(2),
        "aria-valuetext": words,
      },
      bar,
    ),
    h("small", {}, measured ? words : `${words}, predicted`),
  );
}

function steps(job) {
  const of = job.num_steps ? `/${count(job.num_steps)}` : "";
  return `${count(job.step)}${of} steps`;
}

function jobLink(job, key) {
  return h(
    "button",
    { class: "link", type: "button", title: job.name, "data-key": `${key}-${job.id}`, onclick: () => openJob(job.id) },
    job.name,
  );
}

function drawMember(member) {
  if (!member.own) {
    return h(
      "li",
      { class: "member stranger" },
      h("div", {}, member.id),
      h("div", {}, "another tenant's job"),
      h("div", {}, member.phase),
    );
  }
  const speed = member.measured_tokens_per_s ?? member.predicted_tokens_per_s;
  const where = [member.tenant, member.phase === "training" ? null : member.phase];
  return h(
    "li",
    { class: "member" },
    h("div", {}, jobLink(member, "member"), h("small", {}, where.filter(Boolean).join(" · "))),
    h("div", {}, `loss ${precise(member.loss)}`, h("small", {}, `${steps(member)}, ${compact(speed)} tok/s`)),
    meter(member),
  );
}

function drawGroup(group) {
  const { measured_tokens_per_s: measured, predicted_tokens_per_s: predicted } = group;
  const guess = predicted ? `${compact(predicted)} predicted` : null;
  const speed = measured
    ? [h("b", {}, compact(measured)), [" tok/s", guess].filter(Boolean).join(", ")]
    : [guess && `${guess} tok/s`];
  const places = group.gpus.map(([node, gpu]) => `${node}:${gpu}`).join(" ");
  return h(
    "section",
    { class: `card group ${colour(group.gang)}`, "aria-label": `gang ${group.gang}` },
    h(
      "h3",
      {},
      group.gang,
      h("span", {}, [group.base, layoutWords(group), `GPU ${places}`].filter(Boolean).join(" · ")),
    ),
    h(
      "p",
      { class: "facts" },
      group.members.length ? h("span", {}, ...speed) : null,
      h("span", {}, `${group.state}, ${duration(now() - group.since)}`),
    ),
    group.members.length
      ? h("ul", { class: "members" }, group.members.map(drawMember))
      : h("p", { class: "none" }, "kept warm: no job at present"),
  );
}

function drawGroups(groups) {
  const none = h("p", { class: "none card" }, "Nothing trains at present.");
  show(byId("groups"), groups.length ? h("div", { class: "groups" }, groups.map(drawGroup)) : none);
}

// Losses: the past is asked for, then every event adds a point; evaluations are asked for again.
const curves = new Map();
const MOST_POINTS = 600;
const OLD_S = 60;

async function begin(id) {
  const own = curves.get(id) ?? { points: [], evaluations: [] };
  own.at = now();
  curves.set(id, own);
  try {
    const { points, evaluations } = await get(`/v1/curves/${encodeURIComponent(id)}`);
    const last = points.length ? points.at(-1)[0] : -1;
    own.points = [...points, ...own.points.filter(([step]) => step > last)];
    own.evaluations = evaluations;
  } catch {
    // The past is missing then; what comes is drawn.
  }
}

function addLoss(member) {
  const known = curves.get(member.id);
  const isOld = known?.evaluations.length && now() - known.at > OLD_S;
  if (!known || isOld) begin(member.id).then(() => drawLosses());
  const { points } = curves.get(member.id);
  if (!isNumber(member.loss)) return;
  while (points.length && points.at(-1)[0] > member.step) points.pop();
  if (!points.length || points.at(-1)[0] < member.step) points.push([member.step, member.loss]);
  if (points.length > MOST_POINTS) points.splice(0, points.length, ...points.filter((_, i) => i % 2));
}

function drawLosses() {
  const own = latest.groups.flatMap((group) =>
    group.members.filter((m) => m.own).map((member) => ({ group, member })),
  );
  const shown = own.filter(({ member }) => curves.get(member.id)?.points.length);
  byId("s-losses").hidden = !shown.length;
  const room = byId("losses").clientWidth || 260;
  const columns = Math.max(1, Math.floor((room + 10) / 240));
  const size = { width: Math.round((room + 10) / columns) - 36 };
  const figures = shown.map(({ group, member }) =>
    h(
      "figure",
      { class: `card ${colour(group.gang)}`, "data-job": member.id, onclick: () => openJob(member.id) },
      h("figcaption", {}, jobLink(member, "loss"), h("b", {}, precise(member.loss))),
      curve(curves.get(member.id), size),
    ),
  );
  show(byId("losses"), figures);
}
