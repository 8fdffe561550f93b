// Checkpoints of the chosen runs: which is the latest, what validation said, how large, whether all of it is there.
import { type Checkpoint, useAnswer } from "./api";
import { ago, bytes, clock, number } from "./format";
import type { Chosen } from "./main";
import { Badge, Copy, Empty, Problem, RunTitle } from "./parts";

export function CheckpointsPage({ chosen }: { chosen: Chosen[] }) {
  return (
    <>
      {chosen.map((one) => (
        <Checkpoints key={one.run.id} one={one} />
      ))}
    </>
  );
}

function Checkpoints({ one }: { one: Chosen }) {
  const { data, error } = useAnswer<{ checkpoints: Checkpoint[]; folder: string }>(`/api/runs/${one.run.id}/checkpoints`, 0, one.run.version);
  const core = [...new Set(data?.checkpoints.flatMap(({ metrics }) => Object.keys(metrics ?? {}).filter((name) => name.startsWith("val-core/"))) ?? [])].slice(0, 3);
  const latest = data?.checkpoints.find((checkpoint) => checkpoint.latest && !checkpoint.problem);
  return (
    <section class="health-run">
      <RunTitle run={one.run} colour={one.colour} />
      <Problem text={error} />
      {data && !data.checkpoints.length && (
        <Empty title="No checkpoints">
          Set <code>trainer.save_freq</code> to save every so many steps.
        </Empty>
      )}
      {data && data.checkpoints.length > 0 && (
        <>
          <table>
            <thead>
              <tr>
                <th>Checkpoint</th>
                <th class="right">Size</th>
                <th class="right">Files</th>
                {core.map((name) => (
                  <th key={name} class="right">
                    {name.replace("val-core/", "")}
                  </th>
                ))}
                <th>Parts</th>
                <th class="right">Saved</th>
              </tr>
            </thead>
            <tbody>
              {data.checkpoints.map((checkpoint) => (
                <tr key={checkpoint.name}>
                  <td>
                    <div class="name">
                      <strong>{checkpoint.name}</strong>
                      {checkpoint.latest && <Badge kind="finished">latest</Badge>}
                      {checkpoint.problem && <Badge kind="failed">damaged</Badge>}
                    </div>
                    <Problem text={checkpoint.problem ?? null} />
                  </td>
                  <td class="right">{bytes(checkpoint.bytes)}</td>
                  <td class="right">{number(checkpoint.files)}</td>
                  {core.map((name) => (
                    <td key={name} class="right">
                      {number(checkpoint.metrics?.[name])}
                    </td>
                  ))}
                  <td class="quiet">{checkpoint.parts?.join(", ") ?? "–"}</td>
                  <td class="right" title={clock(checkpoint.saved)}>
                    {ago(checkpoint.saved)}
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
          {latest && (
            <>
              <p class="quiet">As a Hugging Face folder:</p>
              <Copy text={`strop merge --local_dir ${data.folder}/${latest.name}/${latest.parts?.some((part) => part.startsWith("actor/")) ? "actor" : ""} --target_dir OUT`} />
            </>
          )}
        </>
      )}
    </section>
  );
}
