import { render } from "preact";
import { useEffect, useMemo, useState } from "preact/hooks";
import { type Run, useAnswer } from "./api";
import { CheckpointsPage } from "./checkpoints";
import { ConfigPage } from "./config";
import { CurvesPage } from "./curves";
import { brief } from "./format";
import { HealthPage } from "./health";
import { focusSearch, HELP, useKeys } from "./keys";
import { Border, coloursOf, Dot, Empty, Problem } from "./parts";
import { RolloutsPage } from "./rollouts";
import { go, href, kept, type Page, PAGES, read, restore, useRoute } from "./route";
import { RunsPage } from "./runs";

export interface Chosen {
  run: Run;
  colour: string;
}

const TITLES: Record<Page, string> = {
  runs: "Runs",
  curves: "Curves",
  rollouts: "Rollouts",
  config: "Config",
  health: "Health",
  checkpoints: "Checkpoints",
};

/** The runs that pages speak of: those in the address, or the one that was written to last. */
function choose(runs: Run[], wanted: string | undefined): Chosen[] {
  const colours = coloursOf(runs);
  const ids = (wanted ?? "").split(",").filter(Boolean);
  const named = runs.filter((run) => ids.includes(run.id));
  const newest = [...runs].sort((a, b) => (b.updated ?? 0) - (a.updated ?? 0)).slice(0, 1);
  return (named.length ? named : newest).map((run) => ({ run, colour: colours.get(run.id)! }));
}

function useTheme(): [string, () => void] {
  const [theme, setTheme] = useState(localStorage.getItem("theme") ?? "");
  const dark = theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  useEffect(() => {
    if (theme) document.documentElement.dataset.theme = theme;
  }, [theme]);
  const toggle = () => {
    const next = dark ? "light" : "dark";
    localStorage.setItem("theme", next);
    setTheme(next);
  };
  return [dark ? "dark" : "light", toggle];
}

function App() {
  const route = useRoute();
  const [theme, toggleTheme] = useTheme();
  const [help, setHelp] = useState(false);
  const listed = useAnswer<{ root: string; runs: Run[] }>("/api/runs", 4000);
  const runs = listed.data?.runs ?? [];
  const chosen = useMemo(() => choose(runs, route.settings.runs), [listed.data, route.settings.runs]);
  const open = (page: Page) => go(page, kept(read().settings));
  useKeys({
    ...Object.fromEntries(PAGES.map((page, i) => [String(i + 1), () => open(page)])),
    "/": focusSearch,
    t: toggleTheme,
    "?": () => setHelp(!help),
    Escape: () => setHelp(false),
  });
  useEffect(() => {
    document.title = `${TITLES[route.page]} · ${listed.data?.root ?? "Strop board"}`;
  }, [route.page, listed.data?.root]);
  return (
    <>
      <header>
        <a class="brand" href={href("runs", kept(route.settings))}>
          <svg viewBox="0 0 20 20" aria-hidden="true">
            <path d="M2 14.5 16 3l2 2.2L5.2 17z" />
          </svg>
          Strop
        </a>
        <nav>
          {PAGES.map((page) => (
            <a key={page} href={href(page, kept(route.settings))} aria-current={page === route.page ? "page" : undefined}>
              {TITLES[page]}
              {page === "health" && chosen.some(({ run }) => run.alerts > 0) && <span class="count">{chosen.reduce((sum, { run }) => sum + run.alerts, 0)}</span>}
            </a>
          ))}
        </nav>
        <div class="chosen">
          {route.page !== "runs" &&
            chosen.map(({ run, colour }) => (
              <span class="chip" key={run.id} title={run.name}>
                <Dot colour={colour} />
                <span>{brief(run.name)}</span>
              </span>
            ))}
        </div>
        <button type="button" class="plain" onClick={toggleTheme} title="dark or light (t)" aria-label="dark or light">
          {theme === "dark" ? "☀" : "☾"}
        </button>
        <button type="button" class="plain" onClick={() => setHelp(true)} title="keys (?)" aria-label="keys">
          ?
        </button>
      </header>
      {listed.error && <Problem text={`The board does not answer (${listed.error}); trying again.`} />}
      <main class={route.page}>
        {listed.data && !runs.length && route.page !== "runs" ? (
          <NoRuns />
        ) : (
          <Border key={route.page}>
            <Shown page={route.page} runs={runs} chosen={chosen} theme={theme} ready={listed.data !== null} />
          </Border>
        )}
      </main>
      {help && <Help close={() => setHelp(false)} />}
    </>
  );
}

function Shown({ page, runs, chosen, theme, ready }: { page: Page; runs: Run[]; chosen: Chosen[]; theme: string; ready: boolean }) {
  if (!ready) return <div class="waiting" aria-busy="true" />;
  switch (page) {
    case "runs":
      return runs.length ? <RunsPage runs={runs} /> : <NoRuns />;
    case "curves":
      return <CurvesPage chosen={chosen} theme={theme} />;
    case "rollouts":
      return <RolloutsPage chosen={chosen} />;
    case "config":
      return <ConfigPage chosen={chosen} />;
    case "health":
      return <HealthPage chosen={chosen} />;
    case "checkpoints":
      return <CheckpointsPage chosen={chosen} />;
  }
}

function NoRuns() {
  return (
    <Empty title="No runs here yet">
      A run appears as soon as it writes metrics.jsonl. Start one with <code>strop quickstart</code>, or open the board on another folder:{" "}
      <code>strop board DIR</code>.
    </Empty>
  );
}

function Help({ close }: { close: () => void }) {
  return (
    <div class="veil" onClick={close}>
      <div class="sheet" role="dialog" aria-label="keys" onClick={(event) => event.stopPropagation()}>
        <h2>Keys</h2>
        <dl>
          {HELP.map(([key, what]) => (
            <>
              <dt>
                {key.split("  ").map((one) => (
                  <kbd key={one}>{one}</kbd>
                ))}
              </dt>
              <dd>{what}</dd>
            </>
          ))}
        </dl>
      </div>
    </div>
  );
}

restore();
render(<App />, document.getElementById("app")!);
