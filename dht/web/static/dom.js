// Building and updating the page. Text is only ever set as text: nothing from the swarm is parsed as markup.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "rect", "path", "line", "circle", "title", "g"]);

/** An element. Children: elements, strings, numbers, arrays; null and false are left out. */
export function h(tag, attributes, ...children) {
  const el = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    el.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    el.append(child instanceof Node ? child : String(child));
  }
  return el;
}

/** Text that strangers chose: isolated, so that its direction does not reach its neighbours. */
export const said = (text) => h("bdi", {}, text);

/** Make `parent`'s children those given, changing as little as possible, so that focus and selection stay. */
export function fill(parent, ...children) {
  const wanted = h("div", {}, ...children);
  morphChildren(parent, wanted);
}

function morphChildren(parent, wanted) {
  let at = parent.firstChild;
  for (const next of [...wanted.childNodes]) {
    if (at === null) { parent.append(next); continue; }
    const after = at.nextSibling;
    if (at.nodeType !== next.nodeType || at.nodeName !== next.nodeName || (at.id ?? "") !== (next.id ?? "")) {
      at.replaceWith(next);
    } else if (at.nodeType === Node.TEXT_NODE) {
      if (at.data !== next.data) at.data = next.data;
    } else {
      morphAttributes(at, next);
      morphChildren(at, next);
    }
    at = after;
  }
  while (at !== null) { const after = at.nextSibling; at.remove(); at = after; }
}

function morphAttributes(el, next) {
  for (const { name } of [...el.attributes]) if (!next.hasAttribute(name)) el.removeAttribute(name);
  for (const { name, value } of [...next.attributes]) if (el.getAttribute(name) !== value) el.setAttribute(name, value);
}
