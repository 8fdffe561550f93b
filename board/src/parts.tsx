// Small pieces that pages share.
import { Component, type ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import type { Run } from "./api";

export const COLOURS = [
  ...["#4f6bed", "#e8710a", "#12a150", "#c2369c", "#0e9bb8", "#b58900", "#d13438", "#7a5af5"],
  ...["#8d5a3b", "#5b8c00", "#e5679e", "#607d8b"],
];

/** The colour of each run. It follows from its name and from the runs that started before it, so it is the same in every browser, and
 * a new run changes no other. */
export function coloursOf(runs: Run[]): Map<string, string> {
  const used = COLOURS.map(() => 0);
  const oldest = [...runs].sort((a, b) => (a.started ?? Infinity) - (b.started ?? Infinity) || (a.id < b.id ? -1 : 1));
  return new Map(
    oldest.map((run) => {
      const first = Number.parseInt(run.id.slice(0, 6), 16) % COLOURS.length;
      const places = COLOURS.map((_, i) => (first + i) % COLOURS.length);
      const place = places.reduce((best, one) => (used[one] < used[best] ? one : best));
      used[place] += 1;
      return [run.id, COLOURS[place]];
    }),
  );
}

export function Dot({ colour }: { colour: string }) {
  return <span class="dot" style={{ background: colour }} />;
}

export function Badge({ kind, children }: { kind: string; children: ComponentChildren }) {
  return <span class={`badge ${kind}`}>{children}</span>;
}

export function Empty({ title, children }: { title: string; children?: ComponentChildren }) {
  return (
    <div class="empty">
      <h3>{title}</h3>
      {children && <p>{children}</p>}
    </div>
  );
}

export function Problem({ text }: { text: string | null }) {
  return text ? (
    <p class="problem" role="alert">
      {text}
    </p>
  ) : null;
}

export function Damaged({ files }: { files?: string[] }) {
  return files?.length ? (
    <div class="problem" role="alert">
      {files.map((file) => (
        <p key={file}>{file}</p>
      ))}
    </div>
  ) : null;
}

/** A field that says what was typed when typing pauses. */
export function Search(props: { value: string; onChange: (text: string) => void; placeholder: string; label?: string }) {
  const [text, setText] = useState(props.value);
  useEffect(() => setText(props.value), [props.value]);
  useEffect(() => {
    if (text === props.value) return;
    const timer = setTimeout(() => props.onChange(text), 250);
    return () => clearTimeout(timer);
  }, [text]);
  return (
    <input
      type="search"
      value={text}
      placeholder={props.placeholder}
      aria-label={props.label ?? props.placeholder}
      spellcheck={false}
      maxLength={200}
      onInput={(event) => setText(event.currentTarget.value)}
      onKeyDown={(event) => event.key === "Enter" && props.onChange(text)}
    />
  );
}

export function Choice<T extends string>(props: { of: readonly (readonly [T, string])[]; value: T; onChange: (one: T) => void; label: string }) {
  return (
    <div class="choice" role="group" aria-label={props.label}>
      {props.of.map(([one, name]) => (
        <button key={one} type="button" aria-pressed={one === props.value} onClick={() => props.onChange(one)}>
          {name}
        </button>
      ))}
    </div>
  );
}

export function Sparkline({ values, colour }: { values: (number | null)[]; colour: string }) {
  const known = values.filter((one): one is number => one !== null);
  if (known.length < 2) return <span class="spark" />;
  const low = Math.min(...known);
  const span = Math.max(...known) - low || 1;
  const points = known.map((one, i) => `${((i / (known.length - 1)) * 116 + 2).toFixed(1)},${(24 - ((one - low) / span) * 20).toFixed(1)}`);
  return (
    <svg class="spark" viewBox="0 0 120 26" aria-hidden="true">
      <polyline points={points.join(" ")} fill="none" stroke={colour} stroke-width="1.6" stroke-linejoin="round" />
    </svg>
  );
}

export function Copy({ text }: { text: string }) {
  const [done, setDone] = useState(false);
  return (
    <div class="copy">
      <code>{text}</code>
      <button
        type="button"
        onClick={() =>
          void navigator.clipboard?.writeText(text).then(() => {
            setDone(true);
            setTimeout(() => setDone(false), 1500);
          })
        }
      >
        {done ? "copied" : "copy"}
      </button>
    </div>
  );
}

export function State({ run }: { run: Run }) {
  return (
    <Badge kind={run.state}>
      {run.state}
      {run.state === "running" && run.phase ? ` · ${run.phase}` : ""}
    </Badge>
  );
}

export function RunTitle({ run, colour }: { run: Run; colour: string }) {
  return (
    <h2 class="run-title">
      <Dot colour={colour} />
      {run.name}
    </h2>
  );
}

/** Around a page: what goes wrong in it is said in its place, and the others still open. */
export class Border extends Component<{ children: ComponentChildren }, { problem: string | null }> {
  state = { problem: null };
  static getDerivedStateFromError(error: Error) {
    return { problem: error.message };
  }
  render() {
    return this.state.problem ? <Problem text={`This page broke: ${this.state.problem}. Reload it, and please report it.`} /> : this.props.children;
  }
}
