// Numbers, times and sizes as people read them.
import type { Num } from "./api";

/** Four significant digits; very large and very small ones by powers of ten. */
export function number(value: Num | undefined): string {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value;
  if (Number.isInteger(value) && Math.abs(value) < 1e10) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value === 0 ? "0" : value.toExponential(2);
  return size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
}

export function signed(value: Num | undefined): string {
  return typeof value === "number" && value > 0 ? `+${number(value)}` : number(value).replace("-", "−");
}

export function bytes(count: number | undefined): string {
  if (count === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let size = count;
  let unit = 0;
  while (size >= 1000 && unit < units.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${size >= 100 || unit === 0 ? Math.round(size) : size.toFixed(1)} ${units[unit]}`;
}

export function duration(seconds: number): string {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${(seconds / 86400).toFixed(1)} d`;
}

export function ago(time: number | null | undefined): string {
  if (!time) return "–";
  const seconds = Date.now() / 1000 - time;
  return seconds < 5 ? "now" : `${duration(seconds)} ago`;
}

export function clock(time: number | undefined): string {
  return time ? new Date(time * 1000).toLocaleString("sv").slice(0, 16) : "–";
}

export function value(of: unknown): string {
  if (typeof of === "number" && of !== 0 && Math.abs(of) < 1e-3) return of.toExponential();
  return typeof of === "string" ? of : JSON.stringify(of);
}

/** Characters as the server counts them: an emoji is one, though two units of a JavaScript string. */
export function characters(text: string): number {
  let count = 0;
  for (const _ of text) count += 1;
  return count;
}

export function plural(count: number, one: string): string {
  return `${number(count)} ${one}${count === 1 ? "" : "s"}`;
}

/** A long name without its middle: what names have in common is mostly at the beginning, what tells them apart at the end. */
export function brief(name: string, most = 28): string {
  const end = Math.ceil((most - 1) * 0.65);
  return name.length <= most ? name : `${name.slice(0, most - 1 - end)}…${name.slice(-end)}`;
}

export function lastPart(path: string | null): string {
  return path ? (path.replace(/\/+$/, "").split("/").pop() ?? path) : "–";
}
