import os,sys,time
sys.path[:0]=["/tmp/sound","/tmp/w15","/tmp/w15/tests"]
os.environ["XLA_FLAGS"]="--xla_force_host_platform_device_count=8"
import jax, tiny, train, soundness
from input_loader import batch_shapes
from modeling.model import load_model
c=tiny.config(microbatches=1)
with jax.set_mesh(tiny.mesh(sys.argv[1] if len(sys.argv)>1 else "r=2 d=2 t=2")):
    model=load_model(c.model)
    progs=train.programs(c,model,batch_shapes(c.training.batch_size,c.training.seq_len,0))
for n,p in progs.items():
    t=time.time()
    problems,outs=soundness.check(p.jaxpr,keep_going=True)
    print(n,round(time.time()-t,2),"s",len(problems),"problems; outputs ok",sum(o[0] for o in outs),"of",len(outs))
    for x in problems[:12]: print("  ",x[:300])
    for o in outs:
        if not o[0]: print("  out",o)
