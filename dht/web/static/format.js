// Figures as people read them, always with their unit; what is not known is said so.

export const UNKNOWN = "unknown";

function digits(value) {
  return Math.abs(value) >= 100 ? value.toFixed(0) : String(Number(value.toPrecision(3)));
}

function scaled(value, step, units) {
  let at = 0;
  while (Math.abs(value) >= step && at < units.length - 1) { value /= step; at += 1; }
  return `${at === 0 && Number.isInteger(value) ? value : digits(value)} ${units[at]}`;
}

const or = (make) => (value) => (value === null || value === undefined ? UNKNOWN : make(value));

export const bytes = or((v) => scaled(v, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]));
export const rate = or((v) => scaled(v * 8, 1000, ["bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"]));
export const flops = or((v) => scaled(v, 1000, ["FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s"]));
export const work = or((v) => scaled(v, 1000, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP", "ZFLOP"]));
export const seconds = or((v) => (v < 1 ? `${digits(v * 1000)} ms` : v < 120 ? `${digits(v)} s` : span(v)));
export const loss = or((v) => (Math.abs(v) >= 1000 ? v.toExponential(2) : v.toFixed(4)));
export const times = or((v) => `${digits(v)}×`);
export const count = or((v) => v.toLocaleString("en"));
export const percent = or((v) => `${Math.round(v * 100)}%`);
export const tokens = or((v) => `${v >= 1e4 ? scaled(v, 1000, ["", "k", "M", "G"]) : digits(v)} tokens/s`);

export function span(s) {
  s = Math.max(0, Math.round(s));
  if (s < 120) return `${s} s`;
  if (s < 7200) return `${Math.round(s / 60)} min`;
  return s < 172800 ? `${Math.round(s / 3600)} h` : `${Math.round(s / 86400)} days`;
}

export const ago = (now, then) => `${span(now - then)} ago`;
export const short = (peer) => `..${peer.slice(-8)}`;
export const stage = (k) => (k < 0 ? "trainer" : `stage ${k}`);

export function clock(t) {
  const at = new Date(t * 1000);
  const time = at.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
  return at.toDateString() === new Date().toDateString() ? time : `${at.toLocaleDateString()} ${time}`;
}
