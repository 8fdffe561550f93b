// All runs: how far, how good, how healthy; those that are ticked are compared on the other pages.
import { useState } from "preact/hooks";
import { type Curves, query, type Run, useAnswer } from "./api";
import { ago, duration, lastPart, number, plural } from "./format";
import { useKeys } from "./keys";
import { type Notes, NotesSheet } from "./notes";
import { Badge, coloursOf, Damaged, Dot, Empty, Search, Sparkline, State } from "./parts";
import { go, kept, read, set, useRoute } from "./route";

const MAIN = ["critic/score/mean", "train/loss"];
const SPARKS = 50;

type Key = "name" | "state" | "step" | "main" | "validation" | "updated";

const mainOf = (run: Run) => MAIN.find((name) => name in run.metrics);
const validationOf = (run: Run) => Object.keys(run.metrics).find((name) => name.startsWith("val-core/") || name === "val/loss");

function sortValue(run: Run, key: Key): string | number {
  switch (key) {
    case "name":
      return run.name;
    case "state":
      return run.state;
    case "step":
      return run.step ?? -1;
    case "main":
      return Number(run.metrics[mainOf(run) ?? ""] ?? -Infinity);
    case "validation":
      return Number(run.metrics[validationOf(run) ?? ""] ?? -Infinity);
    case "updated":
      return run.updated ?? 0;
  }
}

function found(run: Run, text: string): boolean {
  const all = [run.name, run.project, run.experiment, run.algorithm, run.model, run.state, ...run.tags, run.note].join(" ").toLowerCase();
  return text.toLowerCase().split(/\s+/).every((word) => all.includes(word));
}

export function RunsPage({ runs: listed }: { runs: Run[] }) {
  const { settings } = useRoute();
  const [written, setWritten] = useState<Record<string, Notes>>({});
  const [noted, setNoted] = useState<string | null>(null);
  const runs = listed.map((run) => ({ ...run, ...written[run.id] }));
  const [cursor, setCursor] = useState(0);
  const colours = coloursOf(runs);
  const ticked = new Set((settings.runs ?? "").split(",").filter(Boolean));
  const [key, down] = [(settings.sort ?? "updated") as Key, settings.down !== "0"];
  const shown = runs
    .filter((run) => found(run, settings.find ?? ""))
    .sort((a, b) => {
      const [x, y] = [sortValue(a, key), sortValue(b, key)];
      return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1);
    });
  const tick = (id: string) => {
    const next = new Set(ticked);
    if (!next.delete(id)) next.add(id);
    set({ runs: [...next].join(",") }, true);
  };
  const open = (run: Run) => go("curves", { ...kept(read().settings), runs: ticked.has(run.id) ? [...ticked].join(",") : run.id });
  const at = Math.min(cursor, shown.length - 1);
  useKeys({
    j: () => setCursor(Math.min(at + 1, shown.length - 1)),
    k: () => setCursor(Math.max(at - 1, 0)),
    x: () => shown[at] && tick(shown[at].id),
    Enter: () => shown[at] && open(shown[at]),
  });
  const about = runs.find((run) => run.id === noted);
  const sparks = useSparks(shown.slice(0, SPARKS));
  const heading = (name: Key, label: string, kind = "") => (
    <th class={kind} aria-sort={key === name ? (down ? "descending" : "ascending") : undefined}>
      <button type="button" onClick={() => set({ sort: name, down: key === name && down ? "0" : "1" }, true)}>
        {label}
      </button>
    </th>
  );
  return (
    <>
      <div class="bar">
        <Search value={settings.find ?? ""} onChange={(find) => set({ find }, true)} placeholder="Filter runs: name, tag, state" />
        <span class="quiet">{shown.length === runs.length ? plural(runs.length, "run") : `${shown.length} of ${runs.length} runs`}</span>
        <span class="gap" />
        {ticked.size > 0 && (
          <>
            <button type="button" onClick={() => set({ runs: "" }, true)}>
              Clear
            </button>
            <button type="button" class="main" onClick={() => go("curves", kept(read().settings))}>
              Compare {ticked.size}
            </button>
          </>
        )}
      </div>
      {!shown.length && <Empty title="No run matches">Take words away from the filter.</Empty>}
      {shown.length > 0 && (
        <table class="runs-table">
          <thead>
            <tr>
              <th />
              {heading("name", "Run")}
              {heading("state", "State")}
              {heading("step", "Step", "right")}
              {heading("main", "Score", "right")}
              <th>Curve</th>
              {heading("validation", "Validation", "right")}
              <th class="right">Length</th>
              <th>Algorithm</th>
              <th>Model</th>
              {heading("updated", "Updated", "right")}
            </tr>
          </thead>
          <tbody>
            {shown.map((run, i) => {
              const colour = colours.get(run.id)!;
              const validation = validationOf(run);
              return (
                <tr key={run.id} class={i === at ? "at" : ""} onClick={() => open(run)}>
                  <td onClick={(event) => event.stopPropagation()}>
                    <input type="checkbox" checked={ticked.has(run.id)} onChange={() => tick(run.id)} aria-label={`compare ${run.name}`} />
                  </td>
                  <td>
                    <div class="name">
                      <Dot colour={colour} />
                      <strong>{run.name}</strong>
                      {run.alerts > 0 && <Badge kind="warning">{plural(run.alerts, "alert")}</Badge>}
                      {run.damaged.length > 0 && <Badge kind="failed">damaged file</Badge>}
                      {run.tags.map((tag) => (
                        <Badge key={tag} kind="tag">
                          {tag}
                        </Badge>
                      ))}
                      <button
                        type="button"
                        class="plain note"
                        title="note and tags"
                        aria-label={`note on ${run.name}`}
                        onClick={(event) => (event.stopPropagation(), setNoted(run.id))}
                      >
                        ✎
                      </button>
                    </div>
                    <div class="quiet small">{[run.project, run.experiment].filter(Boolean).join(" / ")}</div>
                    {run.note && <div class="small note-text">{run.note}</div>}
                    <Damaged files={run.damaged} />
                  </td>
                  <td>
                    <State run={run} />
                  </td>
                  <td class="right">
                    <div>
                      {number(run.step)}
                      {run.total ? <span class="quiet"> / {number(run.total)}</span> : null}
                    </div>
                    {run.total ? <progress max={run.total} value={run.step ?? 0} /> : null}
                  </td>
                  <td class="right" title={mainOf(run)}>
                    {number(run.metrics[mainOf(run) ?? ""])}
                  </td>
                  <td>
                    <Sparkline values={sparks[run.id] ?? []} colour={colour} />
                  </td>
                  <td class="right" title={validation}>
                    {number(run.metrics[validation ?? ""])}
                  </td>
                  <td class="right">{number(run.metrics["response_length/mean"])}</td>
                  <td>{run.algorithm ?? "–"}</td>
                  <td title={run.model ?? ""}>{lastPart(run.model)}</td>
                  <td class="right">
                    <div>{ago(run.updated)}</div>
                    {run.started && run.updated ? <div class="quiet small">ran {duration(run.updated - run.started)}</div> : null}
                  </td>
                </tr>
              );
            })}
          </tbody>
        </table>
      )}
      {about && (
        <NotesSheet
          run={about}
          notes={about}
          close={(saved) => {
            if (saved) setWritten({ ...written, [about.id]: saved });
            setNoted(null);
          }}
        />
      )}
    </>
  );
}

function useSparks(runs: Run[]): Record<string, (number | null)[]> {
  const path = runs.length ? query("/api/curves", { run: runs.map((run) => run.id).sort(), metric: MAIN, points: 60 }) : null;
  const { data } = useAnswer<Curves>(path, 0, runs.map((run) => run.version).join());
  return Object.fromEntries(Object.entries(data ?? {}).map(([id, curves]) => [id, (curves[MAIN[0]] ?? curves[MAIN[1]])?.value ?? []]));
}
