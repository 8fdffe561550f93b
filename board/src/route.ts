// Where the reader is, in the address: a page and its settings, so that a view can be bookmarked and shared.
import { useEffect, useState } from "preact/hooks";

export const PAGES = ["runs", "curves", "rollouts", "config", "health", "checkpoints"] as const;
export type Page = (typeof PAGES)[number];
export type Settings = Record<string, string>;

export interface Route {
  page: Page;
  settings: Settings;
}

export function read(hash = location.hash): Route {
  const [path, text] = hash.replace(/^#\/?/, "").split("?");
  const page = (PAGES as readonly string[]).includes(path) ? (path as Page) : "runs";
  return { page, settings: Object.fromEntries(new URLSearchParams(text ?? "")) };
}

export function href(page: Page, settings: Settings): string {
  const kept = Object.entries(settings).filter(([, value]) => value !== "");
  const text = new URLSearchParams(kept).toString();
  return `#/${page}${text ? `?${text}` : ""}`;
}

/** Settings that hold on every page, and when the board is opened again. */
const KEPT = ["runs", "smooth", "x", "log", "seeds"];
const STORED = "settings";

export function kept(settings: Settings): Settings {
  return Object.fromEntries(KEPT.flatMap((name) => (settings[name] ? [[name, settings[name]]] : [])));
}

/** The board without an address begins with the settings that were used last. */
export function restore(): void {
  if (location.hash) return;
  const { runs: _, ...settings } = Object.fromEntries(new URLSearchParams(localStorage.getItem(STORED) ?? ""));
  if (Object.keys(settings).length) history.replaceState(null, "", href("runs", settings));
}

export function go(page: Page, settings: Settings): void {
  location.hash = href(page, settings);
}

/** Change some settings of this page; an empty text takes one away. */
export function set(changes: Settings, replace = false): void {
  const { page, settings } = read();
  const target = href(page, { ...settings, ...changes });
  localStorage.setItem(STORED, new URLSearchParams(kept({ ...settings, ...changes })).toString());
  if (replace) {
    history.replaceState(null, "", target);
    dispatchEvent(new HashChangeEvent("hashchange"));
  } else location.hash = target;
}

export function useRoute(): Route {
  const [route, setRoute] = useState(read());
  useEffect(() => {
    const changed = () => setRoute(read());
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return route;
}
