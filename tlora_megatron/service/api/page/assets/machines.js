// Tiles with the most important numbers, and nodes with their GPUs.

function tile(name, value, more) {
  return h("div", {}, h("b", {}, value, more ? h("small", {}, ` ${more}`) : null), h("span", {}, name));
}

function drawTiles({ cluster, groups, jobs, figures }) {
  const sum = (key) => groups.reduce((total, group) => total + (group[key] || 0), 0);
  const measured = groups.filter((group) => group.measured_tokens_per_s);
  const ratios = measured
    .filter((group) => group.predicted_tokens_per_s)
    .map((group) => group.measured_tokens_per_s / group.predicted_tokens_per_s);
  const mean = (tally) => (tally && tally.count ? tally.sum_s / tally.count : null);
  const ratio = ratios.length ? ratios.reduce((a, b) => a + b) / ratios.length : null;
  const training = groups.reduce(
    (total, group) => total + group.members.filter((m) => m.phase === "training").length,
    0,
  );
  show(
    byId("tiles"),
    tile("GPUs that train", count(cluster.gpus.used), `of ${count(cluster.gpus.all)}`),
    tile("tokens a second", compact(sum("measured_tokens_per_s"))),
    tile("jobs that train", count(training), `in ${many(groups.length, "gang")}`),
    tile("jobs that wait", count(jobs.queued_of_all)),
    tile("measured over predicted", ratio ? ratio.toFixed(2) : "–"),
    tile("pause for a newcomer", seconds(mean(figures.join))),
    tile("for a decision", seconds(mean(figures.decide))),
  );
}

function drawGpu(node, gpu) {
  const place = `${node.node}:${gpu.gpu}`;
  const aside = gpu.set_aside_until;
  const words = [gpu.gang, aside ? "set aside" : null].filter(Boolean).join(", ") || "free";
  const more = aside ? `, gets no jobs until ${clock(aside)}` : "";
  const kind = `${aside ? "aside " : ""}${gpu.gang ? `held ${colour(gpu.gang)}` : ""}`;
  return h(
    "li",
    { class: `gpu ${kind}`, title: `GPU ${place}: ${words}${more}` },
    h("span", {}, place),
    gpu.gang ? h("b", {}, gpu.gang) : aside ? "aside" : "free",
  );
}

function drawNode(node) {
  const held = node.gpus.filter((gpu) => gpu.gang).length;
  const name = node.host || `node ${node.node}`;
  return h(
    "div",
    { class: `card node${node.healthy ? "" : " down"}` },
    h(
      "h3",
      {},
      h("span", {}, name),
      node.healthy
        ? h("small", {}, `${held} of ${node.gpus.length} held`)
        : h("span", { class: "bad" }, "is gone"),
    ),
    h("ul", { class: "gpus", "aria-label": `GPUs of ${name}` }, node.gpus.map((g) => drawGpu(node, g))),
  );
}

function drawMachines(cluster) {
  const none = h("p", { class: "none" }, "No controller has shown its machines yet: `tlora serve` starts one.");
  const nodes = cluster.nodes.map(drawNode);
  show(byId("machines"), nodes.length ? h("div", { class: "nodes" }, nodes) : none);
}
