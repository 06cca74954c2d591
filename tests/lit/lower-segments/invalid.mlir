// What the ops on segments refuse.
// RUN: gossamer-opt %s -p lower-segments --split-input-file --verify-diagnostics

func.func @kind(%positions: tensor<?xi32>, %x: tensor<?xf32>) -> tensor<?xf32> {
  // expected-error @+1 {{'kernel.segment_reduce' has the kind 'mean', must be add or mul or max or min}}
  %m = "kernel.segment_reduce"(%positions) ({
    %0 = "kernel.read"(%x) {map = affine_map<(s, p) -> (p)>} : (tensor<?xf32>) -> f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {kind = "mean"} : (tensor<?xi32>) -> tensor<?xf32>
  return %m : tensor<?xf32>
}

// -----

func.func @positions(%positions: tensor<?xf32>, %x: tensor<?xf32>) -> tensor<?xf32> {
  // expected-error @+1 {{'kernel.segment_map' has positions tensor<?xf32>, must be integers [segments+1]}}
  %m = "kernel.segment_map"(%positions) ({
    %0 = "kernel.read"(%x) {map = affine_map<(s, p) -> (p)>} : (tensor<?xf32>) -> f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {each = "entry"} : (tensor<?xf32>) -> tensor<?xf32>
  return %m : tensor<?xf32>
}
