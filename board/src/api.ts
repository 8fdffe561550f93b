// What the server says, typed, and how pages ask for it.
import { useEffect, useRef, useState } from "preact/hooks";

export type Num = number | string | null; // "NaN" and "Infinity" travel as texts

export interface Run {
  id: string;
  name: string;
  project: string | null;
  experiment: string | null;
  algorithm: string | null;
  model: string | null;
  /** The same for runs that differ in their seeds alone. */
  family: string | null;
  step: number | null;
  total: number | null;
  started: number | null;
  updated: number | null;
  metrics: Record<string, Num>;
  version: string;
  state: "running" | "finished" | "failed" | "stopped";
  phase: string | null;
  alerts: number;
  checkpoints: number;
  samples: Record<string, number>;
  damaged: string[];
  note: string;
  tags: string[];
}

export interface Curve {
  step: number[];
  time: (number | null)[];
  value: (number | null)[];
}
export type Curves = Record<string, Record<string, Curve>>;

export interface GroupLine {
  step: number;
  group: number;
  index: number;
  data_source: string;
  prompt: string;
  scores: Num[];
  mean: Num;
  spread: Num;
  zero_variance: boolean;
  failed: number;
  truncated: number;
  tokens: number;
}
export interface GroupPage {
  groups?: GroupLine[];
  total?: number;
  damaged?: string[];
  left?: number;
  next?: [number, number] | null;
}

export interface Text {
  text: string;
  length: number;
}
export interface Turn {
  role: string;
  start: number;
  end: number;
  reward: Num;
}
export interface Picture {
  width: number;
  height: number;
  video: boolean;
  /** A data URL; null where no picture was kept. */
  source: string | null;
}
export interface Sample {
  sample: number;
  score: Num;
  advantage: Num;
  failed: boolean;
  truncated: boolean;
  finish: string;
  version: number;
  response_tokens: number;
  num_turns: number;
  tool_results: number;
  turns: Turn[];
  response: Text;
  reported: Record<string, Num>;
  /** Places of its images in those of the group. */
  images: number[];
}
export interface Group {
  step: number;
  group: number;
  index: number;
  data_source: string;
  ground_truth: Text | null;
  prompt: Text;
  prompt_tokens: number;
  images: Picture[];
  samples: Sample[];
  damaged?: string[];
}
type List = (number | null)[] | null;
export interface Tokens {
  start: number;
  length: number;
  ids: number[];
  tokens: string[];
  role: number[];
  rollout_log_probs: List;
  trained_log_probs: List;
  ref_log_probs: List;
  entropy: List;
  advantages: List;
  values: List;
}
export interface History {
  steps: { step: number; group: number; scores: Num[] }[];
  left: number;
  damaged: string[];
}
export interface Config {
  values: Record<string, unknown>;
  plan: [string, string, string][] | null;
  damaged: string[];
}
export interface Alert {
  step?: number;
  time?: number;
  name?: string;
  severity?: string;
  message?: string;
  advice?: string;
  values?: Record<string, Num>;
}
export interface Checkpoint {
  step: number;
  name: string;
  latest: boolean;
  bytes?: number;
  files?: number;
  parts?: string[];
  metrics?: Record<string, Num>;
  saved?: number;
  problem?: string;
}

export function query(path: string, values: Record<string, string | number | string[] | undefined>): string {
  const found = new URLSearchParams();
  for (const [key, value] of Object.entries(values)) {
    if (Array.isArray(value)) value.forEach((one) => found.append(key, one));
    else if (value !== undefined && value !== "") found.set(key, String(value));
  }
  const text = found.toString();
  return text ? `${path}?${text}` : path;
}

export async function get<T>(path: string, signal?: AbortSignal): Promise<T> {
  const reply = await fetch(path, { signal, headers: { accept: "application/json" } });
  const kind = reply.headers.get("content-type") ?? "";
  const body = kind.includes("json") ? await reply.json() : { error: await reply.text() };
  if (!reply.ok) throw new Error(body.error ?? `HTTP ${reply.status}`);
  return body as T;
}

export interface Asked<T> {
  data: T | null;
  error: string | null;
  waiting: boolean;
}

/** The answer to `path`, asked again whenever it or `fresh` changes, and every `every` milliseconds while the page is looked at.
 * The last answer stays while the next is under way; another path starts empty. */
export function useAnswer<T>(path: string | null, every = 0, fresh = ""): Asked<T> {
  const [asked, setAsked] = useState<Asked<T> & { path: string | null }>({ data: null, error: null, waiting: true, path });
  const current = useRef(path);
  current.current = path;
  useEffect(() => {
    if (path === null) return;
    const stop = new AbortController();
    const ask = () =>
      get<T>(path, stop.signal).then(
        (data) => setAsked({ data, error: null, waiting: false, path }),
        (problem: Error) => {
          if (!stop.signal.aborted)
            setAsked((before) => ({
              data: before.path === path ? before.data : null,
              error: problem.message,
              waiting: false,
              path,
            }));
        },
      );
    void ask();
    const timer = every ? setInterval(() => document.hidden || void ask(), every) : 0;
    return () => {
      stop.abort();
      clearInterval(timer);
    };
  }, [path, every, fresh]);
  return asked.path === path ? asked : { data: null, error: null, waiting: path !== null };
}
