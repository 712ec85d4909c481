# The image of every Ray node; no other file has its name. The tag contains the Ray version, which client and nodes must share.
#   source cluster/image.sh
#   docker build -f cluster/Dockerfile -t "$TRIAL_RAY_IMAGE" . && docker push "$TRIAL_RAY_IMAGE"
#   envsubst '$TRIAL_RAY_IMAGE' < cluster/raycluster.yaml | kubectl apply -f -
export TRIAL_RAY_IMAGE=registry.example.com/trial-ray:0.1.0-ray2.60.0
