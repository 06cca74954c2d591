// bf16 by dot products of pairs where the target has them.
// RUN: gossamer-opt %s -p 'expose-storage,lower-routed-product' | filecheck %s

// CHECK-LABEL: func.func private @region_many6(
// CHECK-COUNT-24: x86.avx512.dot
// CHECK-LABEL: func.func @region(
// CHECK:         arith.truncf
func.func @region(%x: tensor<?x?xbf16>, %weight: tensor<?x?x?xbf16>, %scales: tensor<?x?x?xf32>, %bias: tensor<?x?xf32>, %positions: tensor<?xi64>, %order: tensor<?xi64>) -> tensor<?x?xbf16> {
  %y = "kernel.routed_product"(%x, %weight, %scales, %bias, %positions, %order) {top = 1 : i64, dots = 1 : i64, four = 0 : i64, group = 0 : i64, turned = 0 : i64} : (tensor<?x?xbf16>, tensor<?x?x?xbf16>, tensor<?x?x?xf32>, tensor<?x?xf32>, tensor<?xi64>, tensor<?xi64>) -> tensor<?x?xbf16>
  return %y : tensor<?x?xbf16>
}
