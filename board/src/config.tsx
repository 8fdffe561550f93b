// The resolved configuration of the chosen runs, what differs between them, and the arithmetic of their batches.
import { type Config, useAnswer } from "./api";
import { value } from "./format";
import type { Chosen } from "./main";
import { Choice, Damaged, Dot, Empty, RunTitle, Search } from "./parts";
import { set, useRoute } from "./route";

const MOST = 8;
const WHICH = [
  ["different", "Differences"],
  ["all", "All keys"],
] as const;

export function ConfigPage({ chosen }: { chosen: Chosen[] }) {
  const { settings } = useRoute();
  const shown = chosen.slice(0, MOST);
  const asked = Array.from({ length: MOST }, (_, i) => useAnswer<Config>(shown[i] ? `/api/runs/${shown[i].run.id}/config` : null));
  const configs = shown.map((_, i) => asked[i].data);
  const which = (settings.which ?? (shown.length > 1 ? "different" : "all")) as "different" | "all";
  const words = (settings.find ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  const keys = [...new Set(configs.flatMap((config) => Object.keys(config?.values ?? {})))].sort();
  // A run that has no configuration at all differs from the others in nothing that is worth a line.
  const written = configs.map((config) => config !== null && Object.keys(config.values).length > 0);
  const texts = (key: string) => configs.map((config) => (config && key in config.values ? value(config.values[key]) : undefined));
  const wanted = keys.filter((key) => {
    const found = texts(key);
    const there = found.filter((_, i) => written[i]);
    if (which === "different" && shown.length > 1 && there.every((text) => text === there[0])) return false;
    return words.every((word) => `${key} ${found.join(" ")}`.toLowerCase().includes(word));
  });
  const plans = (
    <div class="plans">
      {configs.map((config, i) => config?.plan && <Plan key={shown[i].run.id} one={shown[i]} plan={config.plan} />)}
    </div>
  );
  return (
    <>
      <div class="bar">
        {shown.length > 1 && <Choice of={WHICH} value={which} onChange={(one) => set({ which: one }, true)} label="which keys" />}
        <Search value={settings.find ?? ""} onChange={(find) => set({ find }, true)} placeholder="Find keys and values" />
        <span class="quiet">
          {wanted.length} of {keys.length} keys
        </span>
      </div>
      {configs.map((config, i) => (
        <Damaged key={shown[i].run.id} files={config?.damaged.map((text) => `${shown[i].run.name}: ${text}`)} />
      ))}
      {which === "all" && plans}
      {keys.length > 0 && !wanted.length && (
        <Empty title={which === "different" ? "No differences" : "No key matches"}>
          {which === "different" ? "These runs have the same configuration." : "Parts of keys and of values will do."}
        </Empty>
      )}
      {!keys.length && configs.every(Boolean) && <Empty title="No configuration was written">The file tracker writes it: keep file in trainer.logger.</Empty>}
      {wanted.length > 0 && (
        <table class="config-table">
          <thead>
            <tr>
              <th>Key</th>
              {shown.map(({ run, colour }) => (
                <th key={run.id}>
                  <Dot colour={colour} />
                  {run.name}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {wanted.map((key) => (
              <tr key={key}>
                <td>
                  <code>{key}</code>
                </td>
                {texts(key).map((text, i) => (
                  <td key={shown[i].run.id}>
                    <code class={text === "null" || text === undefined ? "quiet" : ""}>{text ?? "not there"}</code>
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      )}
      {which === "different" && plans}
      {chosen.length > MOST && <p class="quiet more">{MOST} of {chosen.length} runs are compared.</p>}
    </>
  );
}

function Plan({ one, plan }: { one: Chosen; plan: [string, string, string][] }) {
  return (
    <section class="card">
      <RunTitle run={one.run} colour={one.colour} />
      <table class="plan">
        <tbody>
          {plan.map(([what, count, why]) => (
            <tr key={what}>
              <td>{what}</td>
              <td class="right">
                <b>{count}</b>
              </td>
              <td class="quiet">{why}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </section>
  );
}
