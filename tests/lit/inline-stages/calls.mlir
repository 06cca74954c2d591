// The bodies of private functions take the place of their calls, those inside of kernel ops included; the functions go.
// RUN: gossamer-opt %s -p inline-stages | filecheck %s

// CHECK-NOT:   @stage0
// CHECK-LABEL: func.func @region(%arg0: tensor<?x8xf32>, %arg1: tensor<8xf32>, %arg2: tensor<8xf32>) -> tensor<?x8xf32> {
// CHECK-NEXT:    %[[A:.*]] = "kernel.map"() ({
// CHECK-NEXT:      "kernel.read"(%arg0)
// CHECK-NEXT:      "kernel.read"(%arg1)
// CHECK:         %[[B:.*]] = "kernel.map"() ({
// CHECK-NEXT:      "kernel.read"(%[[A]])
// CHECK-NEXT:      "kernel.read"(%arg2)
// CHECK:         return %[[B]]
#M = affine_map<(t, n) -> (t, n)>
#V = affine_map<(t, n) -> (n)>
func.func private @stage0(%x: tensor<?x8xf32>, %b: tensor<8xf32>) -> tensor<?x8xf32> {
  %y = "kernel.map"() ({
    %0 = "kernel.read"(%x) {map = #M} : (tensor<?x8xf32>) -> f32
    %1 = "kernel.read"(%b) {map = #V} : (tensor<8xf32>) -> f32
    %2 = arith.addf %0, %1 : f32
    "kernel.yield"(%2) : (f32) -> ()
  }) : () -> tensor<?x8xf32>
  return %y : tensor<?x8xf32>
}
func.func @region(%x: tensor<?x8xf32>, %a: tensor<8xf32>, %b: tensor<8xf32>) -> tensor<?x8xf32> {
  %0 = call @stage0(%x, %a) : (tensor<?x8xf32>, tensor<8xf32>) -> tensor<?x8xf32>
  %1 = call @stage0(%0, %b) : (tensor<?x8xf32>, tensor<8xf32>) -> tensor<?x8xf32>
  return %1 : tensor<?x8xf32>
}
