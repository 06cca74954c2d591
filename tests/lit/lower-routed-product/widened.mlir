// Tokens of bf16 without dot products: a tile of many slots widens its columns once, and then reads f32 elements.
// RUN: gossamer-opt %s -p 'expose-storage,lower-routed-product{bits=256}' | filecheck %s

// CHECK-LABEL: func.func private @region_many6(
// CHECK:          scf.for
// CHECK-COUNT-6:    arith.extf {{.*}} : vector<8xbf16> to vector<8xf32>
// CHECK:          memref.prefetch
// CHECK:          scf.for
// CHECK-NOT:        arith.extf
// CHECK-COUNT-12:   vector.fma
// CHECK-LABEL: func.func private @region_many4(
func.func @region(%x: tensor<?x?xbf16>, %weight: tensor<?x?x?xbf16>, %scales: tensor<?x?x?xf32>, %bias: tensor<?x?xf32>, %positions: tensor<?xi64>, %order: tensor<?xi64>) -> tensor<?x?xbf16> {
  %y = "kernel.routed_product"(%x, %weight, %scales, %bias, %positions, %order) {top = 8 : i64, dots = 0 : i64, four = 0 : i64, group = 0 : i64, turned = 0 : i64} : (tensor<?x?xbf16>, tensor<?x?x?xbf16>, tensor<?x?x?xf32>, tensor<?x?xf32>, tensor<?xi64>, tensor<?xi64>) -> tensor<?x?xbf16>
  return %y : tensor<?x?xbf16>
}
