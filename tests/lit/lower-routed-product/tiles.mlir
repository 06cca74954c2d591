// Tiles of bf16: rows of the weight are the left operand where they lie, and x is transposed once. Rows or columns that fill no
// tiles are packed, and x is the left operand. Up to 4 slots have dot products.
// RUN: gossamer-opt %s -p 'expose-storage,lower-routed-product{tiles=true}' | filecheck %s

// CHECK-NOT:     region_few8
// CHECK-LABEL: func.func private @region_few4(
// CHECK:         x86.avx512.dot
// CHECK-LABEL: func.func private @region_many32(
// CHECK:         x86.amx.tile_load
// CHECK:         memref.prefetch
// CHECK-COUNT-4: x86.amx.tile_mulf
// CHECK-LABEL: func.func private @region_turn(
// CHECK-COUNT-64: vector.shuffle
// CHECK-LABEL: func.func private @region_rows32x32(
// CHECK-COUNT-4: x86.amx.tile_zero
// CHECK:         scf.for
// CHECK:           memref.prefetch
// CHECK-COUNT-4:   x86.amx.tile_mulf
// CHECK-COUNT-4: x86.amx.tile_store
// CHECK-LABEL: func.func @region(
// CHECK:         func.call @region_turn
// CHECK:         func.call @region_rows32x32
func.func @region(%x: tensor<?x?xbf16>, %weight: tensor<?x?x?xbf16>, %scales: tensor<?x?x?xf32>, %bias: tensor<?x?xf32>, %positions: tensor<?xi64>, %order: tensor<?xi64>) -> tensor<?x?xbf16> {
  %y = "kernel.routed_product"(%x, %weight, %scales, %bias, %positions, %order) {top = 1 : i64, dots = 1 : i64, four = 0 : i64, group = 0 : i64, turned = 0 : i64} : (tensor<?x?xbf16>, tensor<?x?x?xbf16>, tensor<?x?x?xf32>, tensor<?x?xf32>, tensor<?xi64>, tensor<?xi64>) -> tensor<?x?xbf16>
  return %y : tensor<?x?xbf16>
}
