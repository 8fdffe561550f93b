// Alerts of the chosen runs: what was seen, what it usually means, what to try.
import { type Alert, useAnswer } from "./api";
import { clock, number } from "./format";
import type { Chosen } from "./main";
import { Badge, Empty, Problem, RunTitle } from "./parts";

const KINDS: Record<string, string> = { critical: "failed", error: "failed", warning: "warning" };

export function HealthPage({ chosen }: { chosen: Chosen[] }) {
  return (
    <>
      {chosen.map((one) => (
        <Alerts key={one.run.id} one={one} />
      ))}
    </>
  );
}

function Alerts({ one }: { one: Chosen }) {
  const { data, error } = useAnswer<{ alerts: Alert[]; damaged: number }>(`/api/runs/${one.run.id}/alerts`, 0, one.run.version);
  return (
    <section class="health-run">
      <RunTitle run={one.run} colour={one.colour} />
      <Problem text={error} />
      {data && data.damaged > 0 && <Problem text={`${data.damaged} lines of alerts.jsonl cannot be read.`} />}
      {data && !data.alerts.length && <Empty title="No alerts">Nothing that the watch knows of has gone wrong in this run.</Empty>}
      {data?.alerts.map((alert, i) => (
        <article key={i} class={`card alert ${KINDS[alert.severity ?? ""] ?? "quiet"}`}>
          <div class="sample-head">
            <Badge kind={KINDS[alert.severity ?? ""] ?? "quiet"}>{alert.severity ?? "note"}</Badge>
            <strong>{String(alert.name ?? "alert").replaceAll("_", " ")}</strong>
            <span class="gap" />
            <span class="quiet">
              step {number(alert.step)} · {clock(alert.time)}
            </span>
          </div>
          <p>{String(alert.message ?? "")}</p>
          {alert.advice && (
            <p class="advice">
              <b>Try</b> {String(alert.advice)}
            </p>
          )}
          {alert.values && (
            <dl class="components">
              {Object.entries(alert.values).map(([name, one]) => (
                <div key={name}>
                  <dt>{name}</dt>
                  <dd>{number(typeof one === "number" || typeof one === "string" ? one : null)}</dd>
                </div>
              ))}
            </dl>
          )}
        </article>
      ))}
    </section>
  );
}
