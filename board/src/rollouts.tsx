// Rollouts: prompts of a step on the left, all samples of one of them on the right.
import { useEffect, useMemo, useState } from "preact/hooks";
import { get, type Group, type GroupLine, type GroupPage, query, useAnswer } from "./api";
import { number } from "./format";
import { GroupView } from "./group";
import { useKeys } from "./keys";
import type { Chosen } from "./main";
import { Badge, Choice, Damaged, Empty, Problem, Search } from "./parts";
import { set, useRoute } from "./route";

const PAGE = 30;
const SPLITS = [
  ["train", "Training"],
  ["validation", "Validation"],
] as const;
const SHOW: [string, string][] = [
  ["all", "all prompts"],
  ["mixed", "samples disagree"],
  ["zero_variance", "zero variance"],
  ["truncated", "truncated"],
  ["failed", "failed reward"],
];
const SORT: [string, string][] = [
  ["order", "in order"],
  ["worst", "worst first"],
  ["best", "best first"],
  ["spread", "widest spread"],
  ["longest", "longest first"],
];
type Split = (typeof SPLITS)[number][0];

export function RolloutsPage({ chosen }: { chosen: Chosen[] }) {
  const { settings } = useRoute();
  const { run } = chosen.find(({ run }) => run.id === settings.of) ?? chosen[0];
  const base = `/api/runs/${run.id}/samples`;
  const steps = useAnswer<Record<Split, number[]>>(base, 0, run.version);
  if (!steps.data) return <div class="waiting" aria-busy="true" />;
  const split = (settings.split ?? (steps.data.train.length ? "train" : "validation")) as Split;
  const here = steps.data[split] ?? [];
  const everywhere = settings.step === "all";
  const step = everywhere ? null : here.includes(Number(settings.step)) && settings.step ? Number(settings.step) : (here.at(-1) ?? null);
  return (
    <div class="rollouts-page">
      <div class="bar">
        {chosen.length > 1 && (
          <select value={run.id} aria-label="run" onChange={(event) => set({ of: event.currentTarget.value, group: "", at: "" })}>
            {chosen.map(({ run }) => (
              <option key={run.id} value={run.id}>
                {run.name}
              </option>
            ))}
          </select>
        )}
        <Choice of={SPLITS} value={split} onChange={(one) => set({ split: one, step: "", group: "", at: "" })} label="split" />
        <StepPicker steps={here} step={step} everywhere={everywhere} stay={split === "validation"} />
        <select value={settings.show ?? "all"} aria-label="which prompts" onChange={(event) => set({ show: event.currentTarget.value })}>
          {SHOW.map(([one, name]) => (
            <option key={one} value={one}>
              {name}
            </option>
          ))}
        </select>
        <select value={settings.sort ?? "order"} aria-label="order" onChange={(event) => set({ sort: event.currentTarget.value })}>
          {SORT.map(([one, name]) => (
            <option key={one} value={one}>
              {name}
            </option>
          ))}
        </select>
        <Search value={settings.find ?? ""} onChange={(find) => set({ find })} placeholder="Search prompts and answers" />
      </div>
      {!here.length ? (
        <Empty title={`No ${split} samples were kept`}>
          Runs keep samples of every step while trainer.samples_to_keep is above 0 (the default is 128).
        </Empty>
      ) : (
        <Browser key={`${run.id} ${split}`} base={base} split={split} step={step} steps={here} name={run.name} others={chosen.filter((one) => one.run !== run)} />
      )}
    </div>
  );
}

const NEAR = 50;
const FAR = 40;

/** What a list of steps offers, newest first: all, or of a long run those around place `at` and some at even distances. A browser
 * takes seconds to lay out a list of thousands. */
function offered(steps: number[], at: number): number[] {
  const stride = Math.ceil(steps.length / FAR);
  const kept = steps.length <= 2 * NEAR + FAR ? steps : steps.filter((_, i) => Math.abs(i - at) <= NEAR || i % stride === 0);
  return kept.toReversed();
}

/** Validation has the same prompts at every step, so there the reader stays with one. */
function StepPicker({ steps, step, everywhere, stay }: { steps: number[]; step: number | null; everywhere: boolean; stay: boolean }) {
  const go = (next: string) => set({ step: next, at: "", ...(stay ? {} : { group: "" }) });
  const at = step === null ? steps.length : steps.indexOf(step);
  const options = useMemo(() => offered(steps, at), [steps, at]);
  const move = (by: number) => {
    const next = steps[Math.max(0, Math.min(steps.length - 1, at + by))];
    if (next !== undefined) go(String(next));
  };
  useKeys({ "[": () => move(-1), "]": () => move(1) });
  return (
    <div class="step-picker">
      <button type="button" onClick={() => move(-1)} disabled={at <= 0} title="previous step ([)" aria-label="previous step">
        ‹
      </button>
      <select
        value={everywhere ? "all" : String(step)}
        aria-label="step"
        onChange={(event) => go(event.currentTarget.value)}
      >
        <option value="all">all steps</option>
        {options.map((one) => (
          <option key={one} value={one}>{`step ${one}`}</option>
        ))}
      </select>
      <button type="button" onClick={() => move(1)} disabled={everywhere || at >= steps.length - 1} title="next step (])" aria-label="next step">
        ›
      </button>
      {options.length < steps.length && <StepField steps={steps} go={go} />}
    </div>
  );
}

/** Leads to the kept step that is nearest to what was typed. */
function StepField({ steps, go }: { steps: number[]; go: (step: string) => void }) {
  return (
    <input
      type="number"
      min={steps[0]}
      max={steps.at(-1)}
      placeholder="go to"
      aria-label="go to step"
      onChange={({ currentTarget }) => {
        const wanted = currentTarget.valueAsNumber;
        currentTarget.value = "";
        if (!Number.isNaN(wanted)) go(String(steps.reduce((best, one) => (Math.abs(one - wanted) < Math.abs(best - wanted) ? one : best))));
      }}
    />
  );
}

type Place = { offset: number; from?: number };

interface Listed {
  groups: GroupLine[];
  total: number | null;
  next: Place | null;
  left: number;
  damaged: string[];
  error: string | null;
  waiting: boolean;
}
const NOTHING: Listed = { groups: [], total: null, next: null, left: 0, damaged: [], error: null, waiting: true };

/** Pages of groups, one after the other, for one step or over all steps. */
function useGroups(base: string, step: number | null): [Listed, () => void] {
  const { settings } = useRoute();
  const [listed, setListed] = useState<Listed>(NOTHING);
  const path = `${base} ${step} ${settings.show} ${settings.sort} ${settings.find}`;
  const ask = (from: Place, before: Listed, stop?: AbortSignal) => {
    setListed({ ...before, waiting: true });
    const asked = { step: step ?? undefined, show: settings.show, sort: settings.sort, search: settings.find, limit: PAGE, ...from };
    get<GroupPage>(query(base, asked), stop).then(
      (page) => {
        const groups = [...before.groups, ...(page.groups ?? [])];
        const more = step !== null && page.total !== undefined && groups.length < page.total;
        const next: Place | null = more ? { offset: groups.length } : page.next ? { from: page.next[0], offset: page.next[1] } : null;
        const damaged = [...before.damaged, ...(page.damaged ?? [])];
        const found = { groups, total: page.total ?? null, next, left: page.left ?? 0, damaged, error: null, waiting: false };
        setListed(found);
        // A search over all steps goes on by itself until there is something to see.
        if (step === null && page.next && !groups.length && next) ask(next, found, stop);
      },
      (problem: Error) => stop?.aborted || setListed({ ...before, error: problem.message, waiting: false }),
    );
  };
  useEffect(() => {
    const stop = new AbortController();
    ask({ offset: 0 }, NOTHING, stop.signal);
    return () => stop.abort();
  }, [path]);
  return [listed, () => listed.next && !listed.waiting && ask(listed.next, listed)];
}

interface Browsed {
  base: string;
  split: Split;
  step: number | null;
  steps: number[];
  name: string;
  others: Chosen[];
}

function Browser({ base, split, step, steps, name, others }: Browsed) {
  const { settings } = useRoute();
  const [listed, more] = useGroups(`${base}/${split}`, step);
  const key = (line: GroupLine) => `${line.step}.${line.group}`;
  const wanted = settings.group ? `${settings.at ?? step}.${settings.group}` : "";
  const at = Math.max(0, listed.groups.findIndex((line) => key(line) === wanted));
  const current = listed.groups.find((line) => key(line) === wanted) ?? listed.groups[0];
  const elsewhere = settings.at ?? step;
  const hidden = settings.group && elsewhere !== null && !listed.groups.some((line) => key(line) === wanted);
  const place = hidden ? { step: Number(elsewhere), group: Number(settings.group) } : current;
  const open = (line: GroupLine | undefined) => line && set({ group: String(line.group), at: String(line.step) }, true);
  useKeys({
    j: () => (at >= listed.groups.length - 2 && more(), open(listed.groups[at + 1])),
    k: () => open(listed.groups[at - 1]),
  });
  const path = place ? `${base}/${split}/${place.step}/${place.group}` : null;
  const group = useAnswer<Group>(path);
  useEffect(() => document.querySelector(".group-list .at")?.scrollIntoView({ block: "nearest" }), [wanted]);
  return (
    <div class="browser">
      <aside class="group-list" aria-label="prompts">
        <Damaged files={listed.damaged} />
        <Problem text={listed.error} />
        {listed.groups.map((line) => (
          <button type="button" key={key(line)} class={line === current ? "line at" : "line"} onClick={() => open(line)}>
            <Line line={line} step={step === null} />
          </button>
        ))}
        {listed.waiting && <div class="waiting" aria-busy="true" />}
        {listed.waiting && listed.left > 0 && <p class="quiet small looking">{number(listed.left)} steps left to look through</p>}
        {!listed.waiting && !listed.groups.length && !listed.damaged.length && (
          <Empty title="Nothing matches">No prompt {step === null ? "of any step" : "of this step"} is of this kind.</Empty>
        )}
        {!listed.waiting && listed.next && (
          <button type="button" class="more" onClick={more}>
            {step === null ? `More (${listed.left} steps not looked through)` : `More (${listed.groups.length} of ${listed.total})`}
          </button>
        )}
      </aside>
      <div class="group-pane">
        <Problem text={group.error} />
        <Damaged files={group.data?.damaged} />
        {!place && listed.damaged.length > 0 && (
          <Empty title="This step cannot be read">Its file is damaged. Other steps are not affected.</Empty>
        )}
        {group.data?.samples && <GroupView key={path} group={group.data} base={base} split={split} steps={steps} name={name} others={others} />}
      </div>
    </div>
  );
}

function Line({ line, step }: { line: GroupLine; step: boolean }) {
  const known = line.scores.filter((score): score is number => typeof score === "number");
  const [low, high] = [Math.min(0, ...known), Math.max(1, ...known)];
  return (
    <>
      <span class="prompt">{line.prompt}</span>
      <span class="facts">
        <span class="scores" aria-hidden="true">
          {line.scores.slice(0, 32).map((score, i) => (
            <i
              key={i}
              class={typeof score === "number" ? "" : "failed"}
              style={{ height: `${typeof score === "number" ? 3 + (13 * (score - low)) / (high - low) : 16}px` }}
            />
          ))}
        </span>
        <b>{number(line.mean)}</b>
        {step && <span class="quiet">step {line.step}</span>}
        <span class="quiet">{number(Math.round(line.tokens))} tok</span>
        {line.zero_variance && <Badge kind="quiet">no variance</Badge>}
        {line.truncated > 0 && <Badge kind="warning">{line.truncated} cut</Badge>}
        {line.failed > 0 && <Badge kind="failed">{line.failed} failed</Badge>}
      </span>
    </>
  );
}
