// What each page says about a picture: lists of elements, no state of their own.

import { h, said } from "./dom.js";
import * as f from "./format.js";
import { squeezeColour } from "./map.js";
import { store } from "./store.js";

const STATES = ["busy", "free", "paused", "late", "silent", "left"];
const ROWS = 150;

const dot = (state) => h("span", { class: `dot ${state}`, "aria-hidden": "true" });
const badge = (state) => h("span", { class: `badge ${state}` }, dot(state), state);
const peerLink = (peer) => h("a", { href: `#/peer/${peer}`, class: "id" }, f.short(peer));
const runLink = (run) => h("a", { href: `#/run/${run.run}` }, said(run.name || run.run.slice(0, 12)));
const fact = (name, value, note) => h("div", { class: "fact" }, h("dt", {}, name), h("dd", {}, value, note ? h("small", {}, note) : null));
const warnings = (list) => list.length ? h("p", { class: "warn", role: "note" }, h("b", {}, "Not as it should be: "), list.join("; "), ".") : null;
const unknown = (text) => (text === f.UNKNOWN ? h("span", { class: "unknown" }, text) : text);

export function counts(picture) {
  const by = Object.fromEntries(STATES.map((s) => [s, 0]));
  for (const p of picture.peers.values()) by[p.state] += 1;
  return STATES.filter((s) => by[s]).map((s) => h("span", { class: "count" }, dot(s), h("b", {}, by[s]), ` ${s}`));
}

export function legend() {
  return [
    h("span", {}, "Lines are tensors, by how much they are compressed:"),
    ...[["c1", "1–2×"], ["c2", "2–10×"], ["c3", "10–40×"], ["c4", "over 40×"], ["c0", "unknown"]].map(([c, text]) =>
      h("span", { class: "key" }, h("span", { class: `swatch ${c}` }), text)),
  ];
}

export function notes(picture) {
  const out = [];
  if (picture.error) out.push(h("p", { class: "note bad", role: "alert" }, `The bulletin board does not answer; this is what was seen last. ${picture.error}`));
  if (store.past?.gap) out.push(h("p", { class: "note" }, `Nobody looked at ${f.clock(store.past.time)}: a gap in the history.`));
  else if (store.past) out.push(h("p", { class: "note" }, `History: the swarm at ${f.clock(store.past.time)}.`));
  const odd = [...picture.peers.values()].filter((p) => p.warnings.length).length + picture.runs.filter((r) => r.warnings.length).length;
  if (odd) out.push(h("p", { class: "note warn" }, `${odd} record${odd > 1 ? "s hold" : " holds"} things that do not belong there. They are shown as plain text or left out; the pages of these peers and runs say what.`));
  if (picture.refused) out.push(h("p", { class: "note warn" }, `${f.count(picture.refused)} record${picture.refused > 1 ? "s" : ""} refused so far: forged, malformed or out of date.`));
  return out;
}

export function side(picture) {
  const waiting = picture.runs.filter((r) => r.wanted_peers > 0 || r.state === "waiting");
  return [
    h("section", { class: "panel" },
      h("div", { class: "panel-head" }, h("h2", {}, "Runs"), h("a", { href: "#/runs" }, "all")),
      picture.runs.length ? picture.runs.slice(0, 4).map((r) => runCard(r)) : h("p", { class: "empty" }, "No run is on the board.")),
    waiting.length ? h("section", { class: "panel" }, h("h2", {}, "Looking for volunteers"), waiting.map((r) => wants(r))) : null,
    h("section", { class: "panel grow" }, h("h2", {}, "Events"), eventList(eventsShown(), 40)),
  ];
}

function eventsShown() {
  const until = store.past ? store.past.time : Infinity;
  return store.events.filter((e) => e.time <= until).reverse();
}

function wants(run) {
  const needs = run.wanted_peers ? `${run.wanted_peers} more peer${run.wanted_peers > 1 ? "s" : ""}` : "peers";
  return h("p", {}, runLink(run), ` wants ${needs}`, run.wanted_bytes ? ` with ${f.bytes(run.wanted_bytes)} each` : "", run.reason ? h("small", { class: "block" }, said(run.reason)) : null);
}

function progress(run) {
  if (!run.total) return null;
  const share = Math.min(1, run.step / run.total);
  return h("svg", { class: "progress", viewBox: "0 0 100 4", preserveAspectRatio: "none", role: "img", "aria-label": f.percent(share) },
    h("rect", { class: "back", width: 100, height: 4 }), h("rect", { class: "front", width: 100 * share, height: 4 }));
}

function runCard(run) {
  return h("article", { class: "card" },
    h("div", { class: "row" }, h("h3", {}, runLink(run)), badge(run.state)),
    progress(run),
    h("p", { class: "figures" },
      h("span", {}, h("b", { class: "run-loss" }, f.loss(run.loss)), " loss"),
      h("span", {}, h("b", {}, f.count(run.step)), run.total ? ` of ${f.count(run.total)} steps` : " steps"),
      h("span", {}, h("b", {}, f.seconds(run.step_time_s)), " a step")),
    stopped(run),
    run.why && (run.why.kind === "stage" || run.why.kind === "link") ? h("p", { class: "why-line" }, run.why.text) : null);
}

function stopped(run) {
  if (run.state === "training") return null;
  const since = run.since ? ` for ${f.span(store.now() - run.since)}, since ${f.clock(run.since)}` : "";
  return h("p", { class: "stopped" }, `${run.state}${since}`, run.reason ? [": ", said(run.reason)] : "");
}

export function eventList(events, most) {
  if (!events.length) return h("p", { class: "empty" }, "Nothing has happened since the monitor looks.");
  return h("ol", { class: "events" }, events.slice(0, most).map((e) =>
    h("li", { class: e.kind }, h("time", {}, f.clock(e.time)), h("span", { class: "what" }, said(e.text)),
      e.source === "owner" ? h("small", {}, "the owner says") : null)));
}

export function runs(picture) {
  return [
    h("h1", {}, "Runs"),
    picture.runs.length ? h("div", { class: "cards" }, picture.runs.map((r) => h("div", { class: "panel" }, runCard(r))))
      : h("p", { class: "empty" }, "No run is on the board."),
  ];
}

// --- a run

export function run(picture, id) {
  const r = picture.runs.find((x) => x.run === id);
  if (!r) return missing("run", id.slice(0, 12));
  return [
    h("div", { class: "row title" }, h("h1", {}, said(r.name)), badge(r.state)),
    warnings(r.warnings), stopped(r), progress(r),
    h("dl", { class: "facts panel" },
      fact("Loss", h("span", { class: "run-loss" }, unknown(f.loss(r.loss)))), fact("Step", f.count(r.step), r.total ? `of ${f.count(r.total)}` : "no end set"),
      fact("Step time", unknown(f.seconds(r.step_time_s))), fact("Speed", unknown(f.tokens(r.tokens_per_s))),
      fact("Plan", r.plan || "none yet", r.epoch ? `trainer epoch ${r.epoch}` : null), fact("Seen", f.ago(store.now(), r.published), `started ${f.clock(r.created)}`),
      fact("Trainer", peerLink(r.trainer)), fact("Owner's key", h("span", { class: "id" }, r.owner.slice(0, 12)), `run ${r.run.slice(0, 12)}`)),
    why(r), strip(picture, r), linkTable(r),
  ];
}

function why(r) {
  if (!r.why) return null;
  const w = r.why;
  return h("section", { class: `panel why why-${w.kind}` },
    h("h2", {}, "Why is this run slow?"),
    h("p", { class: "verdict" }, w.text, "."), h("p", {}, h("b", {}, w.kind === "unknown" ? "Next: " : "What would help most: "), w.advice, "."));
}

function strip(picture, r) {
  if (!r.stages.length) return h("section", { class: "panel" }, h("h2", {}, "Pipeline"), h("p", { class: "empty" }, "No stage has a host yet."));
  const longest = Math.max(r.step_time_s ?? 0, ...r.stages.map((s) => (s.compute_s ?? 0) + (s.send_s ?? 0) + (s.wait_s ?? 0)), 1e-9);
  const parts = [];
  r.stages.forEach((s, i) => {
    const before = r.stages[i - 1];
    if (before && before.replica === s.replica) parts.push(hop(r, before.stage, s.stage));
    parts.push(stageBox(picture, r, s, longest));
  });
  return h("section", { class: "panel" },
    h("div", { class: "panel-head" }, h("h2", {}, "Pipeline"),
      h("p", { class: "keys" }, ...[["compute", "compute"], ["send", "held up sending"], ["wait", "waiting"]].map(([c, t]) => h("span", { class: "key" }, h("span", { class: `swatch ${c}` }), t)))),
    h("div", { class: "strip", tabindex: 0, role: "group", "aria-label": "Stages in order" }, parts));
}

function stageBox(picture, r, s, longest) {
  const peer = picture.peers.get(s.peer);
  const bound = r.why?.kind === "stage" && r.why.stage === s.stage;
  const width = (v) => 100 * (v ?? 0) / longest;
  const known = s.compute_s !== null;
  const silent = peer === undefined || peer.state === "silent" || peer.state === "left";
  let at = 0;
  const bars = ["compute", "send", "wait"].map((name) => {
    const bar = h("rect", { class: name, x: at, width: width(s[`${name}_s`]), height: 10 });
    at += width(s[`${name}_s`]);
    return bar;
  });
  return h("div", { class: `stage${bound ? " bound" : ""}${silent ? " dead" : ""}` },
    h("div", { class: "row" }, h("b", {}, `Stage ${s.stage}`), s.replica ? h("small", {}, `replica ${s.replica}`) : null, bound ? h("span", { class: "tag" }, "slowest") : null),
    h("div", { class: "row" }, peerLink(s.peer), peer ? badge(peer.state) : h("span", { class: "badge silent" }, dot("silent"), "not seen")),
    known ? h("svg", { class: "bar", viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": `compute ${f.seconds(s.compute_s)}, wait ${f.seconds(s.wait_s)}` },
      h("rect", { class: "back", width: 100, height: 10 }), ...bars) : h("p", { class: "unknown" }, "times unknown"),
    known ? h("p", { class: "fine" }, `${f.seconds(s.compute_s)} compute`, r.step_time_s ? `, ${f.percent(Math.min(1, s.compute_s / r.step_time_s))} of the step` : "") : null,
    s.waiting_for ? h("p", { class: "fine waits" }, "waits for ", said(s.waiting_for)) : null);
}

function hop(r, a, b) {
  const k = r.links.find((x) => x.src === a && x.dst === b);
  const bound = r.why?.kind === "link" && r.why.src === a && (r.why.dst === null || r.why.dst === b);
  return h("div", { class: `hop${bound ? " bound" : ""}` },
    h("span", { class: `arrow ${k ? squeezeColour(k.compression).slice(2) : "c0"}`, "aria-hidden": "true" }, "→"),
    h("small", {}, k ? f.rate(k.bytes_per_s) : f.UNKNOWN), h("small", {}, k?.codec ? said(k.codec) : ""),
    bound ? h("span", { class: "tag" }, "slowest") : null);
}

function linkTable(r) {
  if (!r.links.length) return null;
  const head = ["From", "To", "Rate", "A step", "In all", "Codec", "Compression, estimated", "Why this codec"];
  return h("section", { class: "panel" }, h("h2", {}, "Links"), table(head, r.links.map((k) => [
    f.stage(k.src), f.stage(k.dst), unknown(f.rate(k.bytes_per_s)), unknown(f.bytes(k.bytes_per_step)), unknown(f.bytes(k.bytes_sent)),
    k.codec ? said(k.codec) : unknown(f.UNKNOWN), k.compression === null ? unknown(f.UNKNOWN) : `≈ ${f.times(k.compression)}`, k.why ? h("span", { class: "reason" }, said(k.why)) : unknown(f.UNKNOWN),
  ])));
}

function table(head, rows) {
  return h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Table" }, h("table", {},
    h("thead", {}, h("tr", {}, head.map((t) => h("th", { scope: "col" }, t)))),
    h("tbody", {}, rows.map((cells) => h("tr", {}, cells.map((c) => h("td", {}, c)))))));
}

const missing = (what, name) => [h("h1", {}, `No such ${what}`), h("p", { class: "empty" }, `${what} ${name} is not in this picture. `, h("a", { href: "#/" }, "Back to the overview"))];

// --- peers

const speed = (p) => (p.devices.some((d) => d.flops_per_s !== null) ? p.devices.reduce((n, d) => n + (d.flops_per_s ?? 0), 0) : null);
const SORTS = {
  peer: (p) => p.peer, state: (p) => ["silent", "late", "busy", "free", "paused", "left"].indexOf(p.state), speed: (p) => -(speed(p) ?? -1),
  fence: (p) => p.fence ?? "~", up: (p) => -(p.up_bytes_per_s ?? -1), seen: (p) => -p.published,
};

export function peers(picture, query) {
  const sort = SORTS[query.get("sort")] ? query.get("sort") : "state";
  const words = (query.get("find") ?? "").toLowerCase();
  const all = [...picture.peers.values()].filter((p) => !words || `${p.peer} ${p.state} ${p.fence} ${p.devices.map((d) => `${d.kind} ${d.name}`).join(" ")}`.toLowerCase().includes(words));
  all.sort((a, b) => { const x = SORTS[sort](a), y = SORTS[sort](b); return x < y ? -1 : x > y ? 1 : a.peer < b.peer ? -1 : 1; });
  const shown = query.has("all") ? all : all.slice(0, ROWS);
  const head = (key, text) => h("a", { href: `#/peers?sort=${key}${words ? `&find=${encodeURIComponent(words)}` : ""}`, "aria-current": sort === key ? "true" : null }, text);
  return [
    h("div", { class: "row title" }, h("h1", {}, "Peers"), h("p", {}, `${f.count(all.length)} of ${f.count(picture.peers.size)}`)),
    h("section", { class: "panel" }, table(
      [head("peer", "Peer"), head("state", "State"), "Device", head("speed", "Speed"), "Work", head("up", "Up"), "Down", "Out", "In", "Hours", "Reach", head("fence", "Fence"), "Version", head("seen", "Seen")],
      shown.map((p) => [
        [peerLink(p.peer), p.leads ? h("span", { class: "tag plain", title: "leads its fence" }, "leads") : null, p.warnings.length ? h("span", { class: "tag", title: p.warnings.join("; ") }, "odd") : null],
        badge(p.state), p.devices.length ? p.devices.map((d) => h("span", { class: "block" }, d.kind, " ", said(d.name))) : unknown(f.UNKNOWN), unknown(f.flops(speed(p))),
        p.hosts.length ? p.hosts.map((x) => hosting(x)) : "none", p.up_bytes_per_s === null ? "–" : f.rate(p.up_bytes_per_s), p.down_bytes_per_s === null ? "–" : f.rate(p.down_bytes_per_s),
        p.compression_out === null ? "–" : `≈ ${f.times(p.compression_out)}`, p.compression_in === null ? "–" : `≈ ${f.times(p.compression_in)}`,
        p.hours ? said(p.hours) : "always", unknown(p.reach ?? f.UNKNOWN), p.fence ? h("a", { href: `#/fence/${p.fence}`, class: "id" }, p.fence.slice(0, 6)) : "none",
        said(p.version), f.ago(store.now(), p.published),
      ]))),
    all.length > shown.length ? h("p", {}, h("a", { href: `#/peers?sort=${sort}&all` }, `Show all ${f.count(all.length)}`)) : null,
  ];
}

const hosting = (x) => h("span", { class: "block" }, f.stage(x.stage), " of ", h("a", { href: `#/run/${x.run}` }, x.name ? said(x.name) : x.run.slice(0, 8)), x.confirmed ? "" : h("small", { class: "unknown" }, " by its own word"));

const squeezed = (times) => (times === null ? null : times < 1.05 ? "not compressed" : `compressed about ${f.times(times)}`);

export function peer(picture, id, page) {
  const p = picture.peers.get(id);
  if (!p) return missing("peer", f.short(id));
  const c = page?.contribution;
  return [
    h("div", { class: "row title" }, h("h1", { class: "id" }, f.short(p.peer)), badge(p.state), p.leads ? h("span", { class: "tag plain" }, "leads its fence") : null),
    warnings(p.warnings),
    h("dl", { class: "facts panel" },
      fact("Seen", f.ago(store.now(), p.published)), fact("Hours", p.hours ? said(p.hours) : "always", p.hours ? "its local time" : null), fact("Place", p.place ? said(p.place) : "not said", p.place ? "in its owner's words" : null),
      fact("Reach", unknown(p.reach ?? f.UNKNOWN), "as another peer tried"), fact("Fence", p.fence ? h("a", { href: `#/fence/${p.fence}`, class: "id" }, p.fence.slice(0, 8)) : "none"),
      fact("Up", p.up_bytes_per_s === null ? "no traffic" : f.rate(p.up_bytes_per_s), squeezed(p.compression_out)),
      fact("Down", p.down_bytes_per_s === null ? "no traffic" : f.rate(p.down_bytes_per_s), squeezed(p.compression_in)),
      fact("Version", said(p.version)), fact("Counted work", c ? unknown(f.work(c.flops)) : "none yet", c ? `${f.count(c.frames)} frames, by ${c.issuers} neighbour${c.issuers > 1 ? "s" : ""}` : "by neighbours' receipts")),
    h("section", { class: "panel" }, h("h2", {}, "Devices"), p.devices.length ? table(["Kind", "Name", "Measured speed", "Memory", "Free"],
      p.devices.map((d) => [said(d.kind), said(d.name), unknown(f.flops(d.flops_per_s)), unknown(f.bytes(d.memory_bytes)), unknown(f.bytes(d.free_bytes))])) : h("p", { class: "empty" }, "Being measured.")),
    h("section", { class: "panel" }, h("h2", {}, "Work"), p.hosts.length ? p.hosts.map((x) => h("p", {}, hosting(x))) : h("p", { class: "empty" }, "None.")),
    h("section", { class: "panel" }, h("h2", {}, "Measured links"), page?.links.length ? table(["To", "Round trip", "Up", "Down", "Measured", "Way"],
      page.links.map((k) => [peerLink(k.peer), unknown(f.seconds(k.rtt_s)), unknown(f.rate(k.up_bytes_per_s)), unknown(f.rate(k.down_bytes_per_s)), k.age_s === null ? "–" : `${f.span(k.age_s)} ago`, k.relayed ? "relay" : "direct"])) : h("p", { class: "empty" }, "It has published none.")),
    h("section", { class: "panel" }, h("h2", {}, "Events"), eventList(page?.events ?? [], 30)),
  ];
}

export function fence(picture, id) {
  const x = picture.fences.find((y) => y.fence === id);
  if (!x) return missing("fence", id.slice(0, 8));
  const members = [...picture.peers.values()].filter((p) => p.fence === id);
  return [
    h("div", { class: "row title" }, h("h1", {}, "Fence ", h("span", { class: "id" }, id.slice(0, 8)))),
    h("dl", { class: "facts panel" },
      fact("Leader", peerLink(x.leader), `term ${x.term}`), fact("Members", f.count(x.members), `${members.length} seen`),
      fact("Bandwidth inside", unknown(f.rate(x.bytes_per_s)), `median of ${x.pairs} pairs`), fact("Round trip inside", unknown(f.seconds(x.rtt_s))),
      fact("Spares", x.spares), fact("Nominated", x.nominees.length ? x.nominees.join(", ") : "nobody")),
    x.outside.length ? h("section", { class: "panel" }, h("h2", {}, "To other fences"), table(["Fence", "Bandwidth", "Round trip"],
      x.outside.map((o) => [h("a", { href: `#/fence/${o.fence}`, class: "id" }, o.fence.slice(0, 8)), unknown(f.rate(o.bytes_per_s)), unknown(f.seconds(o.rtt_s))]))) : null,
    h("section", { class: "panel" }, h("h2", {}, "Members"), table(["Peer", "State", "Speed", "Seen"],
      members.slice(0, ROWS).map((p) => [peerLink(p.peer), badge(p.state), unknown(f.flops(speed(p))), f.ago(store.now(), p.published)]))),
  ];
}

export function contribution(rows) {
  return [
    h("h1", {}, "Contribution"),
    h("p", { class: "lead" }, "Work as a peer's neighbours in a run have signed for it; its own word counts for nothing, nor do receipts of the run's trainer or from the same address."),
    h("section", { class: "panel" }, rows === null ? h("p", { class: "empty" }, "Asking.") : rows.length ? table(["", "Peer", "Work", "Frames accepted", "Bytes accepted", "Runs", "Receipts"],
      rows.map((c, i) => [i + 1, peerLink(c.peer), unknown(f.work(c.flops)), f.count(c.frames), f.bytes(c.bytes_accepted), c.runs, c.issuers])) : h("p", { class: "empty" }, "No receipt has been seen yet.")),
  ];
}
