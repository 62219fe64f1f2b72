// What the page knows: the live picture, kept current by server-sent events, and the past one being looked at.

export const store = {
  live: { time: 0, peers: new Map(), runs: [], fences: [], refused: 0, error: null },
  past: null, // a picture like `live`, or {time, gap: true}
  events: [], // oldest first
  connected: false,
  offset: 0, // swarm time minus this machine's clock, seconds
  get shown() { return this.past ?? this.live; },
  now() { return this.past ? this.past.time : Date.now() / 1000 + this.offset; },
};

const EVENTS_KEPT = 300;
const listeners = new Set();
export const onChange = (call) => listeners.add(call);
export const changed = (what) => listeners.forEach((call) => call(what));

let source = null;

/** Follow the swarm while the page is seen: a browser keeps few connections to one server, over all its tabs. */
export function start() {
  const follow = () => {
    if (document.hidden) return stop();
    if (source !== null) return;
    source = new EventSource("/api/stream");
    source.onmessage = (message) => { take(JSON.parse(message.data)); };
    source.onerror = () => { store.connected = false; changed("status"); };
  };
  const stop = () => { source?.close(); source = null; };
  addEventListener("pagehide", stop);
  addEventListener("pageshow", follow);
  document.addEventListener("visibilitychange", follow);
  follow();
}

function take(delta) {
  const peers = delta.full ? new Map() : store.live.peers;
  for (const peer of delta.peers ?? []) peers.set(peer.peer, peer);
  for (const id of delta.gone ?? []) peers.delete(id);
  for (const [id, published] of Object.entries(delta.seen ?? {})) {
    const peer = peers.get(id);
    if (peer) peer.published = published;
  }
  const { time, runs, fences, refused = 0, error = null } = delta;
  store.live = { time, peers, runs, fences, refused, error };
  store.offset = time - Date.now() / 1000;
  store.connected = true;
  if (delta.full) store.events = [];
  remember([...(delta.events ?? []), ...runs.flatMap((r) => r.events)]);
  changed("live");
}

function remember(events) {
  const known = new Set(store.events.map(nameOf));
  const fresh = events.filter((e) => !known.has(nameOf(e)) && known.add(nameOf(e)));
  store.events = [...store.events, ...fresh].sort((a, b) => a.time - b.time).slice(-EVENTS_KEPT);
}

const nameOf = (e) => `${Math.round(e.time)} ${e.run} ${e.text}`;

/** The answer of the JSON API; null where there is none. */
export async function ask(path) {
  try {
    const answer = await fetch(path);
    return answer.ok ? await answer.json() : null;
  } catch {
    return null;
  }
}

let asked = 0;

/** Show the swarm as it was at `time`; null: live again. */
export async function travel(time) {
  asked += 1;
  const mine = asked;
  if (time === null) { store.past = null; changed("time"); return; }
  const answer = await fetch(`/api/history/at?t=${time}`).catch(() => null);
  if (mine !== asked) return;
  const body = answer && answer.ok ? await answer.json() : null;
  if (mine !== asked) return;
  store.past = body === null
    ? { time, gap: true, peers: new Map(), runs: [], fences: [], refused: 0, error: null }
    : { ...body, time, peers: new Map(body.peers.map((p) => [p.peer, p])) };
  changed("time");
}
