==== slurm_all
squeue --jobs 7 --format '%.10i %.20j %.10T %.12M %.6D %R'
tail -n +1 -- /out/jobs/run/slurm-7.log
tail -F -n +1 -- /out/jobs/run/slurm-7.log
scancel 7
==== local
bash -c 'ps -ww -o args= -p "$1" | grep -qF -- "$2" && ps -o pid,stat,etime,args -p "$1" || { echo "process $1 of the job has ended"; exit 1; }' jobs 4711 /out/jobs/run/
tail -n +1 -- /out/jobs/run/job.log
tail -F -n +1 -- /out/jobs/run/job.log
bash -c 'ps -ww -o args= -p "$1" | grep -qF -- "$2" && kill -TERM "$1" || { echo "process $1 of the job has ended"; exit 1; }' jobs 4711 /out/jobs/run/
==== ssh
env 'HOSTS=node0 node1' FOLDER=/out/jobs/run bash -c 'r=0; for h in $HOSTS; do printf '"'"'h=%q; set -- "$(cat %q)" %q; %s\n'"'"' "$h" "$FOLDER/node-$r.pid" "$FOLDER/" '"'"'ps -ww -o args= -p "$1" | grep -qF -- "$2" && echo "$h running" || echo "$h ended"'"'"' | ssh -o BatchMode=yes -o StrictHostKeyChecking=yes -p 2222 "$h" bash -s; r=$((r+1)); done'
tail -n +1 -- /out/jobs/run/node-0.log
tail -F -n +1 -- /out/jobs/run/node-0.log
env 'HOSTS=node0 node1' FOLDER=/out/jobs/run bash -c 'r=0; for h in $HOSTS; do printf '"'"'h=%q; set -- "$(cat %q)" %q; %s\n'"'"' "$h" "$FOLDER/node-$r.pid" "$FOLDER/" '"'"'ps -ww -o args= -p "$1" | grep -qF -- "$2" && kill -TERM "$1" || echo "$h ended"'"'"' | ssh -o BatchMode=yes -o StrictHostKeyChecking=yes -p 2222 "$h" bash -s; r=$((r+1)); done'
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
