// What lies further on is fetched into the second-level cache, for one slot too; past that cache where this is faster.
// RUN: gossamer-opt %s -p 'expose-storage,lower-routed-product' | filecheck %s
// RUN: gossamer-opt %s -p 'expose-storage,lower-routed-product{streams=true}' | filecheck %s --check-prefix=PAST

// CHECK-LABEL: func.func private @region_few8(
// CHECK:         arith.constant 4096 : index
// CHECK:         memref.prefetch {{.*}}, read, locality<2>, data
// CHECK-LABEL: func.func private @region_few1(
// CHECK:         memref.prefetch {{.*}}, read, locality<2>, data
// PAST-LABEL:  func.func private @region_few8(
// PAST:          memref.prefetch {{.*}}, read, locality<0>, data
// PAST-LABEL:  func.func private @region_few1(
// PAST-NOT:      memref.prefetch
// PAST-LABEL:  func.func private @region_pack(
func.func @region(%x: tensor<?x?xf32>, %weight: tensor<?x?x?xf32>, %scales: tensor<?x?x?xf32>, %bias: tensor<?x?xf32>, %positions: tensor<?xi64>, %order: tensor<?xi64>) -> tensor<?x?xf32> {
  %y = "kernel.routed_product"(%x, %weight, %scales, %bias, %positions, %order) {top = 8 : i64, dots = 0 : i64, four = 0 : i64, group = 0 : i64, turned = 0 : i64} : (tensor<?x?xf32>, tensor<?x?x?xf32>, tensor<?x?x?xf32>, tensor<?x?xf32>, tensor<?xi64>, tensor<?xi64>) -> tensor<?x?xf32>
  return %y : tensor<?x?xf32>
}
