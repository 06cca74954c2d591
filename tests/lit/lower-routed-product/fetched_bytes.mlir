// A line of caches has the bytes of four steps, and is fetched once.
// RUN: gossamer-opt %s -p 'expose-storage,lower-routed-product' | filecheck %s

// CHECK-LABEL: func.func private @region_few1(
// CHECK-COUNT-2: memref.prefetch
// CHECK-NOT:     memref.prefetch
// CHECK-COUNT-8: vector.fma
// CHECK-LABEL: func.func private @region_pack(
func.func @region(%x: tensor<?x?xf32>, %weight: tensor<?x?x?xi8>, %scales: tensor<?x?x?xf32>, %bias: tensor<?x?xf32>, %positions: tensor<?xi64>, %order: tensor<?xi64>) -> tensor<?x?xf32> {
  %y = "kernel.routed_product"(%x, %weight, %scales, %bias, %positions, %order) {top = 2 : i64, dots = 0 : i64, four = 0 : i64, group = 0 : i64, turned = 0 : i64} : (tensor<?x?xf32>, tensor<?x?x?xi8>, tensor<?x?x?xf32>, tensor<?x?xf32>, tensor<?xi64>, tensor<?xi64>) -> tensor<?x?xf32>
  return %y : tensor<?x?xf32>
}
