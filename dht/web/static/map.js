// The map: fences as discs, peers in them, bandwidth between fences, tensors between peers.

import { rate, short, times } from "./format.js";

const GAP = 60;
const NEAR = 13; // spacing of peers in a disc; NAMED leaves room for their names
const NAMED = 30;
const SQUEEZE = [[40, "--c4"], [10, "--c3"], [2, "--c2"], [0, "--c1"]];

export const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const squeezeColour = (times) => (times ? SQUEEZE.find(([least]) => times >= least)[1] : "--c0");

/** `open(kind, id)` when something is chosen, `say(text)` when something is looked at. */
export class SwarmMap {
  constructor(container, open, say) {
    this.container = container;
    this.open = open;
    this.say = say;
    this.shape = "";
    this.at = null;
    this.dot = 9; // of a peer, and `font` of a fence: larger where everything is far away
    this.font = 11;
    this.cy = cytoscape({
      container, minZoom: 0.03, maxZoom: 4, boxSelectionEnabled: false, autoungrabify: true,
      pixelRatio: "auto", hideEdgesOnViewport: false, textureOnViewport: false, layout: { name: "preset" },
    });
    this.cy.on("tap", "node.peer", (e) => this.open("peer", e.target.id()));
    this.cy.on("tap", "node.fence", (e) => { if (e.target.data("known")) this.open("fence", e.target.id().slice(6)); });
    this.cy.on("mouseover", "node, edge", (e) => this.say(e.target.scratch("said") ?? e.target.data("said") ?? ""));
    this.cy.on("mouseout", () => this.say(""));
    container.addEventListener("keydown", (e) => this.key(e));
    new ResizeObserver(() => { this.cy.resize(); this.fit(); }).observe(container);
    this.restyle();
  }

  /** After a change of theme. */
  restyle() {
    const ink = css("--ink"), panel = css("--panel");
    const state = (name, colour) => ({ selector: `node.${name}`, style: { "background-color": css(colour) } });
    this.cy.style([
      { selector: "node, edge", style: { "z-index-compare": "manual" } },
      { selector: "node.fence", style: {
        width: "data(size)", height: "data(size)", "background-color": css("--disc"), "border-width": 1.5,
        "border-color": css("--line"), label: "data(label)", color: css("--soft"), "font-size": this.font,
        "text-valign": "top", "text-margin-y": -6, "font-weight": 600, "min-zoomed-font-size": 7, "z-index": 0 } },
      { selector: "node.loose", style: { "border-style": "dashed", "background-opacity": 0.35 } },
      { selector: "node.peer", style: {
        width: this.dot, height: this.dot, "border-width": 1, "border-color": panel, "z-index": 10, "overlay-opacity": 0 } },
      state("free", "--free"), state("busy", "--busy"), state("paused", "--paused"), state("late", "--late"),
      { selector: "node.silent", style: {
        "background-color": css("--silent"), shape: "diamond", width: this.dot + 5, height: this.dot + 5, "z-index": 12 } },
      { selector: "node.left", style: { "background-color": css("--gone"), opacity: 0.4 } },
      { selector: "node.leads", style: { "border-width": 2, "border-color": ink, width: this.dot + 5, height: this.dot + 5 } },
      { selector: "node.named", style: {
        label: "data(label)", "font-size": 6.5, color: css("--soft"), "text-valign": "bottom", "text-margin-y": 2,
        "min-zoomed-font-size": 8 } },
      { selector: "node.at", style: {
        "border-width": 3, "border-color": css("--accent"), width: this.dot + 8, height: this.dot + 8, "z-index": 20 } },
      { selector: "edge", style: { "curve-style": "haystack", "overlay-opacity": 0 } },
      { selector: "edge.between", style: {
        width: "data(width)", "line-color": css("--line"), label: "data(label)", color: css("--soft"),
        "font-size": 0.85 * this.font, "min-zoomed-font-size": 7, "text-background-color": css("--ground"),
        "text-background-opacity": 0.85, "text-background-padding": 2, "z-index": 1 } },
      { selector: "edge.flow", style: {
        "curve-style": "bezier", "control-point-step-size": 24, width: "data(width)", "target-arrow-shape": "triangle",
        "arrow-scale": 0.7, "z-index": 9, opacity: 0.9 } },
      { selector: "edge.control", style: { "line-style": "dashed", opacity: 0.45 } },
      ...["--c1", "--c2", "--c3", "--c4", "--c0"].map((name) => ({
        selector: `edge.${name.slice(2)}`, style: { "line-color": css(name), "target-arrow-color": css(name) } })),
    ]);
  }

  show(picture) {
    const groups = new Map(picture.fences.map((f) => [f.fence, []]));
    for (const peer of picture.peers.values()) {
      const name = peer.fence ?? "";
      if (!groups.has(name)) groups.set(name, []);
      groups.get(name).push(peer);
    }
    const shape = [...groups].map(([f, peers]) => `${f}:${peers.map((p) => p.peer.slice(-6)).sort().join()}`).sort().join(";");
    this.cy.batch(() => {
      if (shape !== this.shape) this.build(groups, picture);
      this.paint(groups, picture);
    });
    if (shape !== this.shape) { this.shape = shape; this.fit(); }
    const { dataset } = this.container;
    dataset.peers = this.cy.nodes(".peer").length;
    dataset.fences = this.cy.nodes(".fence").not(".loose").length;
    dataset.flows = this.cy.edges(".flow").length;
    dataset.silent = this.cy.nodes(".silent").length;
  }

  build(groups, picture) {
    const leaders = new Map(picture.fences.map((f) => [f.fence, f]));
    this.cy.elements().remove();
    const names = picture.peers.size <= 120;
    const space = names ? NAMED : NEAR;
    const discs = [...groups].map(([fence, peers]) => ({ fence, peers, r: space * Math.sqrt(Math.max(3, peers.length)) + 12 }));
    const { width, height } = this.container.getBoundingClientRect();
    pack(discs, Math.min(1.8, Math.max(0.6, width / Math.max(1, height))));
    const nodes = [];
    for (const d of discs) {
      const known = leaders.get(d.fence);
      const label = d.fence ? `fence ${d.fence.slice(0, 6)}` : "no fence yet";
      nodes.push({ group: "nodes", classes: known ? "fence" : "fence loose", selectable: false, position: { x: d.x, y: d.y },
        data: { id: `fence-${d.fence}`, size: 2 * d.r, label: `${label} · ${d.peers.length}`, known: Boolean(known),
          said: `${label}, ${d.peers.length} peers` } });
      d.peers.sort((a, b) => (a.leads !== b.leads ? (a.leads ? -1 : 1) : a.peer < b.peer ? -1 : 1));
      d.peers.forEach((peer, i) => {
        const far = space * Math.sqrt(i), turn = i * 2.399963;
        const kinds = this.kinds(peer, names);
        nodes.push({ group: "nodes", classes: kinds, scratch: { kinds }, position: { x: d.x + far * Math.cos(turn), y: d.y + far * Math.sin(turn) },
          data: { id: peer.peer, label: short(peer.peer), names } });
      });
    }
    this.cy.add(nodes);
  }

  kinds(p, names) {
    return `peer ${p.state}${p.leads ? " leads" : ""}${names || p.leads ? " named" : ""}${this.at === p.peer ? " at" : ""}`;
  }

  paint(groups, picture) {
    for (const peers of groups.values()) {
      for (const p of peers) {
        const node = this.cy.getElementById(p.peer);
        const wanted = this.kinds(p, node.data("names"));
        if (node.scratch("kinds") !== wanted) { node.classes(wanted); node.scratch("kinds", wanted); }
        const stages = p.hosts.filter((x) => x.stage >= 0).map((x) => `stage ${x.stage} of ${x.name || x.run.slice(0, 8)}`);
        node.scratch("said", `${short(p.peer)}: ${p.state}${p.leads ? ", leads its fence" : ""}${stages.length ? `, ${stages.join(", ")}` : ""}`);
      }
    }
    this.edges(picture);
  }

  edges(picture) {
    const wanted = new Map();
    for (const f of picture.fences) {
      for (const o of f.outside) {
        const id = `b-${[f.fence, o.fence].sort().join("-")}`;
        const rateNow = Math.max(o.bytes_per_s ?? 0, wanted.get(id)?.data.rate ?? 0);
        wanted.set(id, { classes: "between", data: {
          id, source: `fence-${f.fence}`, target: `fence-${o.fence}`, rate: rateNow,
          width: rateNow ? Math.min(9, Math.max(1, Math.log10(rateNow) - 3.5)) : 0.8,
          label: rateNow ? rate(rateNow) : "", said: `between fences: ${rate(rateNow || null)}` } });
      }
    }
    for (const run of picture.runs.filter((r) => r.state === "training")) {
      for (const k of run.links) {
        if (!k.src_peer || !k.dst_peer || k.src_peer === k.dst_peer) continue;
        const id = `f-${run.run}-${k.src}-${k.dst}`;
        const control = k.src < 0 || k.dst < 0;
        const said = `${run.name}: ${k.src < 0 ? "trainer" : k.src} to ${k.dst < 0 ? "trainer" : k.dst}, ${rate(k.bytes_per_s)}, ${k.codec ?? "codec unknown"}${k.compression ? `, ${times(k.compression)} smaller` : ""}`;
        wanted.set(id, { classes: `flow ${squeezeColour(k.compression).slice(2)}${control ? " control" : ""}`, data: {
          id, source: k.src_peer, target: k.dst_peer, said,
          width: control ? 1 : k.bytes_per_s ? Math.min(8, Math.max(1.5, Math.log10(k.bytes_per_s) - 2)) : 1.5 } });
      }
    }
    for (const edge of this.cy.edges()) if (!wanted.has(edge.id())) edge.remove();
    for (const [id, edge] of wanted) {
      const { source, target } = edge.data;
      if (this.cy.getElementById(source).empty() || this.cy.getElementById(target).empty()) continue;
      const known = this.cy.getElementById(id);
      if (known.nonempty() && known.data("source") === source && known.data("target") === target) {
        known.data(edge.data);
        known.classes(edge.classes);
      } else {
        if (known.nonempty()) known.remove();
        this.cy.add({ group: "edges", ...edge });
      }
    }
  }

  fit() {
    if (this.cy.elements().empty()) return;
    this.cy.fit(undefined, 24);
    const zoom = this.cy.zoom();
    const dot = Math.min(12, Math.max(9, 5 / zoom)), font = Math.min(48, Math.max(10, 12 / zoom));
    if (Math.abs(dot - this.dot) > 0.5 || Math.abs(font - this.font) > 0.5) {
      this.dot = dot;
      this.font = font;
      this.restyle();
    }
  }

  key(e) {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[e.key];
    if (move) this.step(move);
    else if (e.key === "Enter" && this.at) this.open("peer", this.at);
    else if (e.key === "+" || e.key === "-") this.zoom(e.key === "+" ? 1.3 : 1 / 1.3);
    else if (e.key === "0") this.fit();
    else return;
    e.preventDefault();
    e.stopPropagation();
  }

  zoom(factor) {
    const { width, height } = this.container.getBoundingClientRect();
    this.cy.zoom({ level: this.cy.zoom() * factor, renderedPosition: { x: width / 2, y: height / 2 } });
  }

  /** To the nearest peer in a direction. */
  step([dx, dy]) {
    const peers = this.cy.nodes(".peer");
    if (peers.empty()) return;
    const from = this.at ? this.cy.getElementById(this.at) : null;
    let best = null, least = Infinity;
    if (!from || from.empty()) best = peers[0];
    else {
      const p = from.position();
      for (const node of peers) {
        const q = node.position(), x = q.x - p.x, y = q.y - p.y;
        const along = x * dx + y * dy, aside = Math.abs(x * dy) + Math.abs(y * dx);
        if (along <= 0.5) continue;
        const cost = along + 2.5 * aside;
        if (cost < least) { least = cost; best = node; }
      }
    }
    if (!best) return;
    if (from && from.nonempty()) { from.removeClass("at"); from.scratch("kinds", ""); }
    this.at = best.id();
    best.addClass("at");
    best.scratch("kinds", "");
    const box = best.renderedPosition(), { width, height } = this.container.getBoundingClientRect();
    if (box.x < 0 || box.y < 0 || box.x > width || box.y > height) this.cy.center(best);
    this.say(best.scratch("said") ?? "");
  }
}

/** Discs side by side without overlap, the largest in the middle, each as near to all others as it fits. */
function pack(discs, wide) {
  discs.sort((a, b) => b.r - a.r || (a.fence < b.fence ? -1 : 1));
  const placed = [];
  for (const d of discs) {
    let best = null;
    for (let ring = 0; best === null; ring += 1) {
      const far = ring * 18, steps = ring === 0 ? 1 : Math.max(12, Math.ceil(far / 6));
      for (let i = 0; i < steps; i += 1) {
        const turn = (i / steps) * 2 * Math.PI;
        const x = wide * far * Math.cos(turn), y = far * Math.sin(turn);
        if (!placed.every((o) => Math.hypot(o.x - x, o.y - y) >= o.r + d.r + GAP)) continue;
        const cost = placed.reduce((sum, o) => sum + Math.hypot(o.x - x, wide * (o.y - y)), 0);
        if (best === null || cost < best.cost - 1e-6) best = { x, y, cost };
      }
    }
    d.x = best.x;
    d.y = best.y;
    placed.push(d);
  }
}
