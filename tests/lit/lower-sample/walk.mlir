// A walk over the stored entries; a loop for what is summed over; sums of narrow floats in f32.
// RUN: gossamer-opt %s -p 'expose-storage,lower-sample,canonicalize' --split-input-file | filecheck %s

// CHECK-LABEL: func.func @sddmm(
// CHECK-SAME:    %[[S:[a-z0-9]*]]: tensor<?x?xf32, #sparse>, %[[X:[a-z0-9]*]]: memref<?x?xf32>, %[[Y:[a-z0-9]*]]: memref<?x?xf32>, %[[OUT:[a-z0-9]*]]: memref<?xf32>
// CHECK:         %[[K:.*]] = memref.dim %[[Y]], %c0
// CHECK:         sparse_tensor.foreach in %[[S]] init(%c0)
// CHECK:         ^bb0(%[[I:.*]]: index, %[[J:.*]]: index, %{{.*}}: f32, %[[P:.*]]: index):
// CHECK:           %[[SUM:.*]] = scf.for %[[L:.*]] = %c0 to %[[K]] step %c1 iter_args(%[[TOTAL:.*]] = %{{.*}}) -> (f32)
// CHECK:             %[[A:.*]] = memref.load %[[X]][%[[I]], %[[L]]]
// CHECK:             %[[B:.*]] = memref.load %[[Y]][%[[L]], %[[J]]]
// CHECK:             %[[AB:.*]] = arith.mulf %[[A]], %[[B]] : f32
// CHECK:             arith.addf %[[TOTAL]], %[[AB]]
// CHECK:           memref.store %[[SUM]], %[[OUT]][%[[P]]]
// CHECK:           sparse_tensor.yield
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @sddmm(%s: tensor<?x?xf32, #CSR>, %x: tensor<?x?xf32>, %y: tensor<?x?xf32>) -> tensor<?xf32> {
  %v = "kernel.sample"(%s) ({
    %0 = "kernel.read"(%x) {map = affine_map<(i, j, k) -> (i, k)>} : (tensor<?x?xf32>) -> f32
    %1 = "kernel.read"(%y) {map = affine_map<(i, j, k) -> (k, j)>} : (tensor<?x?xf32>) -> f32
    %2 = arith.mulf %0, %1 : f32
    "kernel.yield"(%2) : (f32) -> ()
  }) {reduced = 1 : i64} : (tensor<?x?xf32, #CSR>) -> tensor<?xf32>
  return %v : tensor<?xf32>
}

// -----

// Nothing is summed over: the values of a dense tensor at the entries.
// CHECK-LABEL: func.func @gather(
// CHECK:         sparse_tensor.foreach
// CHECK-NOT:       scf.for
// CHECK:           memref.load %{{.*}}[%{{.*}}] : memref<?xbf16>
// CHECK:           arith.truncf %{{.*}} : f32 to bf16
// CHECK:           memref.store
#COO = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : compressed(nonunique), d1 : singleton(soa))}>
func.func @gather(%s: tensor<?x?xbf16, #COO>, %x: tensor<?xbf16>) -> tensor<?xbf16> {
  %v = "kernel.sample"(%s) ({
    %0 = "kernel.read"(%x) {map = affine_map<(i, j) -> (j)>} : (tensor<?xbf16>) -> bf16
    %1 = arith.extf %0 : bf16 to f32
    "kernel.yield"(%1) : (f32) -> ()
  }) {reduced = 0 : i64} : (tensor<?x?xbf16, #COO>) -> tensor<?xbf16>
  return %v : tensor<?xbf16>
}
