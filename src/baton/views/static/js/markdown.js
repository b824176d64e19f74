// Answers as text with code blocks, code and bold words. Everything becomes text nodes, never markup.

import { h } from "./dom.js";

export function formatted(text) {
  return text.split(/```/).flatMap((part, index) => {
    if (index % 2 === 0) return inline(part);
    const [, body] = part.match(/^[\w+-]*\n?([\s\S]*)$/) ?? [null, part];
    return [h("pre", { tabIndex: 0 }, h("code", {}, body.replace(/\n$/, "")))];
  });
}

function inline(text) {
  return text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/).map((part) => {
    if (/^`[^`]+`$/.test(part)) return h("code", {}, part.slice(1, -1));
    if (/^\*\*[^*]+\*\*$/.test(part)) return h("strong", {}, part.slice(2, -2));
    return part;
  });
}
