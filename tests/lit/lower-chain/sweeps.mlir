// Maps and sums that need nothing of a whole row from each other have one sweep over the features.
// RUN: gossamer-opt %s -p 'expose-storage,lower-chain,canonicalize,cse' --split-input-file | filecheck %s

// The first sum is a sweep; the map reads it and starts another, which the second sum joins: it squares what the map has made,
// without loading it. The last map needs the second sum.
// CHECK-LABEL: func.func private @centred_rows_tile4(
// CHECK:         scf.for %{{.*}} = %c0 to %c8 step %c1 iter_args
// CHECK:           arith.addf
// CHECK:         scf.for %{{.*}} = %c0 to %c8 step %c1 iter_args
// CHECK-NEXT:      vector.load
// CHECK-NEXT:      %[[CENTRED:.*]] = arith.subf
// CHECK-NEXT:      vector.store %[[CENTRED]]
// CHECK-NEXT:      arith.mulf %[[CENTRED]], %[[CENTRED]]
// CHECK-NEXT:      arith.addf
// CHECK-NEXT:      scf.yield
// CHECK:         scf.for %{{.*}} = %c0 to %c8 step %c1 {
// CHECK:           arith.mulf
// CHECK:           vector.store
// CHECK-NOT:     scf.for
// CHECK:         return
#M = affine_map<(t, n) -> (t, n)>
#R = affine_map<(t, n) -> (t, 0)>
func.func @centred(%x: tensor<?x8xf32>, %w: tensor<8x8xf32, "rowpairs(reduction=1, width=16)">) -> tensor<?x8xf32> {
  %s = "kernel.sum"() ({
    %0 = "kernel.read"(%x) {map = #M} : (tensor<?x8xf32>) -> f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {size = 8 : i64} : () -> tensor<?x1xf32>
  %c = "kernel.map"() ({
    %0 = "kernel.read"(%x) {map = #M} : (tensor<?x8xf32>) -> f32
    %1 = "kernel.read"(%s) {map = #R} : (tensor<?x1xf32>) -> f32
    %2 = arith.subf %0, %1 : f32
    "kernel.yield"(%2) : (f32) -> ()
  }) : () -> tensor<?x8xf32>
  %q = "kernel.sum"() ({
    %0 = "kernel.read"(%c) {map = #M} : (tensor<?x8xf32>) -> f32
    %1 = arith.mulf %0, %0 : f32
    "kernel.yield"(%1) : (f32) -> ()
  }) {size = 8 : i64} : () -> tensor<?x1xf32>
  %n = "kernel.map"() ({
    %0 = "kernel.read"(%c) {map = #M} : (tensor<?x8xf32>) -> f32
    %1 = "kernel.read"(%q) {map = #R} : (tensor<?x1xf32>) -> f32
    %2 = arith.mulf %0, %1 : f32
    "kernel.yield"(%2) : (f32) -> ()
  }) : () -> tensor<?x8xf32>
  %y = "kernel.spmm"(%n, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 4 : i64, reduction = 1 : i64, schedule = "rowpairs", tile = [4, 8]} : (tensor<?x8xf32>, tensor<8x8xf32, "rowpairs(reduction=1, width=16)">) -> tensor<?x8xf32>
  return %y : tensor<?x8xf32>
}
