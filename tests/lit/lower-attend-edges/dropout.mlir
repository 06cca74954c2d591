// Exponentials are summed as they are and kept with dropout, by numbers that depend on the entry, the head and the seed alone.
// RUN: gossamer-opt %s -p 'expose-storage{arrays=true},lower-attend-edges' | filecheck %s

// CHECK-LABEL: func.func private @attend_heads(
// CHECK:         %[[POWER:.*]] = llvm.call_intrinsic "llvm.x86.avx512.mask.scalef.ps.512"
// CHECK:         arith.index_cast %{{.*}} : index to i64
// CHECK:         %[[SEED:.*]] = memref.load %{{.*}} : memref<?xi32>
// CHECK-COUNT-7: arith.muli %{{.*}} : vector<16xi64>
// CHECK:         %[[KEEPS:.*]] = arith.cmpi uge
// CHECK:         %[[KEPT:.*]] = arith.select %[[KEEPS]]
// CHECK:         %[[USED:.*]] = arith.mulf %[[POWER]], %[[KEPT]]
// CHECK:         vector.store %[[USED]]
// CHECK:         arith.addf %{{.*}}, %[[POWER]] : vector<16xf32>
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed), posWidth = 32, crdWidth = 32}>
func.func @attend(%a: tensor<?x?xf32, #CSR>, %v: tensor<?x16xf32>, %t: tensor<?x2xf32>, %n: tensor<?xi32>)
    -> (tensor<?x16xf32>, tensor<?x4xf32>) {
  %y, %s = "kernel.attend_edges"(%a, %v, %t, %n) {
    heads = 2 : i64, weighted = 0 : i64, scale = 1.0 : f64, slope = 0.2 : f64, dropout = 0.5 : f64,
    operandSegmentSizes = array<i32: 1, 1, 1, 0, 0, 0, 0, 0, 1>
  } : (tensor<?x?xf32, #CSR>, tensor<?x16xf32>, tensor<?x2xf32>, tensor<?xi32>) -> (tensor<?x16xf32>, tensor<?x4xf32>)
  return %y, %s : tensor<?x16xf32>, tensor<?x4xf32>
}
