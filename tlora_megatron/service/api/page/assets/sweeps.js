// Sweeps: a row of dots before each rung, a dot a trial, in the colour of what became of it there.

const AT = (stage, isLast) => (isLast && stage.at === 1 ? "to the end" : `to rung at ${Math.round(100 * stage.at)} %`);

function stageRow(stage, isLast) {
  const words = stage.trials.map(([, word]) => word);
  const told = [...new Set(words)].map((word) => `${count(words.filter((own) => own === word).length)} ${word}`);
  const dots = stage.trials.map(([name, word]) => h("i", { class: `trial ${word}`, title: `${name}: ${word}` }));
  return h("p", { class: "stage" }, h("span", {}, AT(stage, isLast)), h("span", { "aria-hidden": true }, dots), h("small", {}, told.join(", ")));
}

function drawSweeps(sweeps) {
  byId("s-sweeps").hidden = !sweeps.length;
  const cards = sweeps.map((sweep) =>
    h(
      "section",
      { class: "card sweep" },
      h("h3", {}, sweep.name, h("small", {}, many(sweep.trials, "trial"))),
      sweep.stages.map((stage, place) => stageRow(stage, place === sweep.stages.length - 1)),
    ),
  );
  show(byId("sweeps"), cards);
}
