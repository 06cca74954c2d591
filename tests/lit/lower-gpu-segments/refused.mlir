// What the lowering does not know.
// RUN: gossamer-opt %s -p expose-storage,lower-gpu-segments --split-input-file --verify-diagnostics

// Integers.
// expected-error @unknown {{GPUs compute with floats only}}
func.func @integers(%p: tensor<?xi32>, %x: tensor<?xi32>) -> tensor<?xi32> {
  %y = "kernel.segment_reduce"(%p) ({
    %0 = "kernel.read"(%x) {map = affine_map<(s, p) -> (p)>} : (tensor<?xi32>) -> i32
    "kernel.yield"(%0) : (i32) -> ()
  }) {kind = "max"} : (tensor<?xi32>) -> tensor<?xi32>
  return %y : tensor<?xi32>
}

// -----

// Two lists of segments at once.
// expected-error @unknown {{must go over the same positions}}
func.func @positions(%p: tensor<?xi32>, %q: tensor<?xi32>, %x: tensor<?xf32>) -> tensor<?xf32> {
  %m = "kernel.segment_reduce"(%p) ({
    %0 = "kernel.read"(%x) {map = affine_map<(s, p) -> (p)>} : (tensor<?xf32>) -> f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {kind = "max"} : (tensor<?xi32>) -> tensor<?xf32>
  %y = "kernel.segment_map"(%q) ({
    %0 = "kernel.read"(%m) {map = affine_map<(s, p) -> (s)>} : (tensor<?xf32>) -> f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {each = "entry"} : (tensor<?xi32>) -> tensor<?xf32>
  return %y : tensor<?xf32>
}
