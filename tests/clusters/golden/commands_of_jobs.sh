==== slurm_all
bash -c 'if ! command -v squeue > /dev/null; then
    echo "squeue is not on this machine: run this where the job was submitted" >&2
    exit 2
fi
queue=$(squeue --jobs "$1" --states all --format "%.10i %.20j %.10T %.12M %.6D %R" 2>&1)
code=$?
if [ "$code" = 0 ] && [ "$(wc -l <<< "$queue")" -gt 1 ]; then echo "$queue"; exit 0; fi
case "$code$queue" in 0*|*"Invalid job id"*) ;; *) echo "$queue" >&2; exit "$code" ;; esac
record=$(sacct -X --noheader --jobs "$1" --format JobID,JobName%20,State%12,ExitCode,Elapsed,End 2> /dev/null)
if [ -n "$record" ]; then echo "$record"; exit 0; fi
echo "job $1 is not in Slurm'"'"'s queue any more, and Slurm'"'"'s accounting has no record of it"
if [ -f "$2" ] && read -r code end < "$2"; then echo "its script ended at $end with exit code $code"; exit 0; fi
echo "its script did not get to its end: the job was cancelled, killed or lost its node (megaswift jobs logs)"
exit 1
' jobs 7 /out/jobs/run/ended-7
tail -n +1 -- /out/jobs/run/slurm-7.log
tail -F -n +1 -- /out/jobs/run/slurm-7.log
bash -c 'queue=$(squeue --noheader --jobs "$1" --format %T 2>&1)
case "$?$queue" in 0|*"Invalid job id"*) exit 1 ;; esac
' jobs 7
scancel -- 7
==== local
bash -c '[[ "$1" =~ ^[0-9]+$ ]] && ps -ww -o args= -p "$1" | grep -qF -- "$2" && ps -o pid,stat,etime,args -p "$1" || { echo "process $1 of the job has ended"; exit 1; }' jobs 4711 /out/jobs/run/
tail -n +1 -- /out/jobs/run/job.log
tail -F -n +1 -- /out/jobs/run/job.log
bash -c '[[ "$1" =~ ^[0-9]+$ ]] && ps -ww -o args= -p "$1" | grep -qF -- "$2"' jobs 4711 /out/jobs/run/
bash -c '[[ "$1" =~ ^[0-9]+$ ]] && ps -ww -o args= -p "$1" | grep -qF -- "$2" && kill -TERM "$1" || { echo "process $1 of the job has ended"; exit 1; }' jobs 4711 /out/jobs/run/
==== ssh
env 'HOSTS=node0 node1' FOLDER=/out/jobs/run bash -c 'set -f; r=0; code=0; for h in $HOSTS; do printf '"'"'h=%q; set -- "$([ -f %q ] && head -c 20 %q)" %q; %s\n'"'"' "$h" "$FOLDER/node-$r.pid" "$FOLDER/node-$r.pid" "$FOLDER/" '"'"'[[ "$1" =~ ^[0-9]+$ ]] && ps -ww -o args= -p "$1" | grep -qF -- "$2" && echo "$h running" || echo "$h ended"'"'"' | ssh -o BatchMode=yes -o StrictHostKeyChecking=yes -- "$h" bash -s || code=$?; r=$((r+1)); done; exit "$code"'
tail -n +1 -- /out/jobs/run/node-0.log
tail -F -n +1 -- /out/jobs/run/node-0.log
env HOSTS=node0 FOLDER=/out/jobs/run bash -c 'set -f; r=0; code=0; for h in $HOSTS; do printf '"'"'h=%q; set -- "$([ -f %q ] && head -c 20 %q)" %q; %s\n'"'"' "$h" "$FOLDER/node-$r.pid" "$FOLDER/node-$r.pid" "$FOLDER/" '"'"'[[ "$1" =~ ^[0-9]+$ ]] && ps -ww -o args= -p "$1" | grep -qF -- "$2"'"'"' | ssh -o BatchMode=yes -o StrictHostKeyChecking=yes -- "$h" bash -s || code=$?; r=$((r+1)); done; exit "$code"'
env 'HOSTS=node0 node1' FOLDER=/out/jobs/run bash -c 'set -f; r=0; code=0; for h in $HOSTS; do printf '"'"'h=%q; set -- "$([ -f %q ] && head -c 20 %q)" %q; %s\n'"'"' "$h" "$FOLDER/node-$r.pid" "$FOLDER/node-$r.pid" "$FOLDER/" '"'"'[[ "$1" =~ ^[0-9]+$ ]] && ps -ww -o args= -p "$1" | grep -qF -- "$2" && kill -TERM "$1" || echo "$h ended"'"'"' | ssh -o BatchMode=yes -o StrictHostKeyChecking=yes -- "$h" bash -s || code=$?; r=$((r+1)); done; exit "$code"'
==== dlc
dlc get job dlc1k2x3y4
dlc logs dlc1k2x3y4 dlc1k2x3y4-worker-0
dlc logs dlc1k2x3y4 dlc1k2x3y4-worker-0
dlc stop job dlc1k2x3y4 --force
==== ray
ray job status --address http://127.0.0.1:8265 run
ray job logs --address http://127.0.0.1:8265 run
ray job logs --address http://127.0.0.1:8265 run --follow
ray job stop --address http://127.0.0.1:8265 run
