// Keyboard: one listener, and pages that say what their keys do.
import { useEffect, useRef } from "preact/hooks";

type Keys = Record<string, () => void>;
const listeners: Keys[] = [];

addEventListener("keydown", (event) => {
  const typing = event.target instanceof HTMLElement && event.target.matches("input, select, textarea");
  if (event.key === "Escape" && typing) (event.target as HTMLElement).blur();
  if (event.ctrlKey || event.metaKey || event.altKey || (typing && event.key !== "Escape")) return;
  for (const keys of [...listeners].reverse()) {
    if (keys[event.key]) {
      event.preventDefault();
      keys[event.key]();
      return;
    }
  }
});

export function useKeys(keys: Keys): void {
  const latest = useRef(keys);
  latest.current = keys;
  useEffect(() => {
    const mine: Keys = new Proxy({} as Keys, { get: (_, key: string) => latest.current[key] });
    listeners.push(mine);
    return () => void listeners.splice(listeners.indexOf(mine), 1);
  }, []);
}

/** "/" goes to the first field that searches. */
export function focusSearch(): void {
  document.querySelector<HTMLInputElement>("input[type=search]")?.focus();
}

export const HELP: [string, string][] = [
  ["1 … 6", "go to a page"],
  ["j  k", "next, previous row or prompt"],
  ["x", "select a run"],
  ["Enter", "open"],
  ["[  ]", "previous, next step of samples"],
  ["c", "next colouring of tokens"],
  ["/", "search or filter"],
  ["t", "dark, light"],
  ["?", "this list"],
  ["Esc", "close, leave a field"],
];
