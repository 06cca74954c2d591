// A warp for each segment: a loop a reduction, its result exchanged across the lanes, and one for the result of the entries.
// RUN: gossamer-opt %s -p 'expose-storage,lower-gpu-segments,canonicalize,cse' | filecheck %s

// CHECK-LABEL: gpu.func @softmax_e256(
// CHECK-SAME:    %[[POS:[a-z0-9]*]]: memref<?xi32>, %[[X:[a-z0-9]*]]: memref<?xf32>, %[[Y:[a-z0-9]*]]: memref<?xf32>)
// CHECK-SAME:    kernel.launch = {blocks = 1 : i64, shared = 0 : i64, threads = 256 : i64, tokens = 256 : i64}
// CHECK-COUNT-2: scf.while
// CHECK:         scf.for
// CHECK:           scf.for {{.*}} step %c32 iter_args
// CHECK:             memref.load %[[X]]
// CHECK:             arith.maximumf
// CHECK:             arith.select
// CHECK:           nvvm.bar.warp.sync
// CHECK-COUNT-5:   gpu.shuffle xor
// CHECK:           scf.for {{.*}} step %c32 iter_args
// CHECK:             math.exp
// CHECK:             arith.addf
// CHECK:           nvvm.bar.warp.sync
// CHECK-COUNT-5:   gpu.shuffle xor
// CHECK:           scf.for {{.*}} step %c32
// CHECK:             math.exp
// CHECK:             arith.divf
// CHECK:             scf.if
// CHECK:               memref.store {{.*}}, %[[Y]]
func.func @softmax(%positions: tensor<?xi32>, %x: tensor<?xf32>) -> tensor<?xf32> {
  %m = "kernel.segment_reduce"(%positions) ({
    %0 = "kernel.read"(%x) {map = affine_map<(s, p) -> (p)>} : (tensor<?xf32>) -> f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {kind = "max"} : (tensor<?xi32>) -> tensor<?xf32>
  %e = "kernel.segment_map"(%positions) ({
    %0 = "kernel.read"(%x) {map = affine_map<(s, p) -> (p)>} : (tensor<?xf32>) -> f32
    %1 = "kernel.read"(%m) {map = affine_map<(s, p) -> (s)>} : (tensor<?xf32>) -> f32
    %2 = arith.subf %0, %1 : f32
    %3 = math.exp %2 : f32
    "kernel.yield"(%3) : (f32) -> ()
  }) {each = "entry"} : (tensor<?xi32>) -> tensor<?xf32>
  %t = "kernel.segment_reduce"(%positions) ({
    %0 = "kernel.read"(%e) {map = affine_map<(s, p) -> (p)>} : (tensor<?xf32>) -> f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {kind = "add"} : (tensor<?xi32>) -> tensor<?xf32>
  %y = "kernel.segment_map"(%positions) ({
    %0 = "kernel.read"(%e) {map = affine_map<(s, p) -> (p)>} : (tensor<?xf32>) -> f32
    %1 = "kernel.read"(%t) {map = affine_map<(s, p) -> (s)>} : (tensor<?xf32>) -> f32
    %2 = arith.divf %0, %1 : f32
    "kernel.yield"(%2) : (f32) -> ()
  }) {each = "entry"} : (tensor<?xi32>) -> tensor<?xf32>
  return %y : tensor<?xf32>
}
