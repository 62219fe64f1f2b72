// Loss and step time of a run over time, with faults and plan changes marked where they happened.

import { ask, store } from "./store.js";
import { clock, loss, seconds } from "./format.js";
import { css } from "./map.js";

const WINDOW_S = 3600;

export class Curves {
  constructor(section) {
    this.section = section;
    this.run = null;
    this.data = null;
    this.plots = {};
    new ResizeObserver(() => this.resize()).observe(section);
  }

  /** Show this run; null hides the curves. */
  async show(run) {
    this.section.hidden = run === null;
    if (run !== this.run) { this.run = run; this.data = null; this.drop(); }
    if (run !== null) await this.load();
  }

  async load() {
    const now = store.live.time, first = Math.max(0, now - WINDOW_S), run = this.run;
    const data = await ask(`/api/runs/${run}/curve?first=${first}&last=${now + 1}&points=600`);
    if (data === null || run !== this.run) return;
    this.data = data;
    this.draw();
  }

  drop() {
    for (const plot of Object.values(this.plots)) plot.destroy();
    this.plots = {};
  }

  draw() {
    if (this.data === null) return;
    this.one("loss", this.data.loss, "--c1", loss);
    this.one("time", this.data.step_time_s, "--c2", seconds);
  }

  one(name, values, colour, format) {
    const data = [this.data.time, values];
    const said = document.getElementById(`${name}-said`);
    const last = values.findLast((v) => v !== null);
    said.textContent = format(last);
    if (this.plots[name]) { this.plots[name].setData(data); return; }
    const ink = css("--soft"), grid = { stroke: css("--grid"), width: 1 };
    const axis = { stroke: ink, grid, ticks: { ...grid, size: 4 }, font: "11px system-ui, sans-serif" };
    const plot = new uPlot({
      ...this.size(name),
      legend: { show: false },
      cursor: { drag: { x: true, y: false }, points: { size: 7 }, sync: { key: "run" } },
      scales: { x: { time: true } },
      axes: [{ ...axis, space: 70, values: (_, ticks, __, ___, step) => ticks.map((t) => hour(t, step)) }, { ...axis, size: 58, values: (_, ticks) => ticks.map((v) => short(v, name)) }],
      series: [{}, { stroke: css(colour), width: 2, spanGaps: false, points: { show: this.data.time.length < 40, size: 5 },
        fill: `${css(colour)}1c` }],
      hooks: {
        draw: [(u) => this.marks(u)],
        setCursor: [(u) => {
          const i = u.cursor.idx;
          said.textContent = i === null || i === undefined || u.data[1][i] == null
            ? format(last) : `${format(u.data[1][i])} at ${clock(u.data[0][i])}, step ${this.data.step[i] ?? "unknown"}`;
        }],
      },
    }, data, document.getElementById(name));
    this.plots[name] = plot;
  }

  marks(u) {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.lineWidth = devicePixelRatio;
    for (const mark of this.data?.marks ?? []) {
      const x = u.valToPos(mark.time, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = ctx.fillStyle = css(mark.kind === "fault" ? "--silent" : "--plan");
      ctx.setLineDash(mark.kind === "fault" ? [] : [4 * devicePixelRatio, 3 * devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      const r = 4 * devicePixelRatio;
      ctx.beginPath();
      if (mark.kind === "fault") { ctx.moveTo(x - r, bbox.top); ctx.lineTo(x + r, bbox.top); ctx.lineTo(x, bbox.top + 1.6 * r); }
      else ctx.rect(x - 0.8 * r, bbox.top, 1.6 * r, 1.6 * r);
      ctx.fill();
    }
    if (store.past) {
      const x = u.valToPos(store.past.time, "x", true);
      ctx.strokeStyle = css("--accent");
      ctx.setLineDash([]);
      ctx.lineWidth = 2 * devicePixelRatio;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  /** After a change of theme or time. */
  redraw(anew) {
    if (anew) { this.drop(); this.draw(); } else for (const plot of Object.values(this.plots)) plot.redraw();
  }

  size(name) {
    const box = document.getElementById(name).getBoundingClientRect();
    return { width: Math.max(200, Math.floor(box.width)), height: 200 };
  }

  resize() { for (const [name, plot] of Object.entries(this.plots)) plot.setSize(this.size(name)); }
}

function hour(t, step) {
  const at = new Date(t * 1000), two = (n) => String(n).padStart(2, "0");
  return `${two(at.getHours())}:${two(at.getMinutes())}${step < 60 ? `:${two(at.getSeconds())}` : ""}`;
}

function short(v, name) {
  if (name === "loss") return Math.abs(v) >= 1000 ? v.toExponential(0) : `${+v.toFixed(4)}`;
  return v < 1 ? `${+(v * 1000).toFixed(1)} ms` : `${+v.toFixed(2)} s`;
}
