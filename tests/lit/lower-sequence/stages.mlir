// Two products and a sum between them: what a later op reads lies at the end of the workspace, the products are left to their schedules.
// RUN: gossamer-opt %s -p 'expose-storage,lower-sequence{bits=512}' | filecheck %s

// CHECK:       module attributes {kernel.tile_workspace = [8, {{[0-9]*}}, 0]}
// CHECK-LABEL: func.func @region(
// CHECK-SAME:    %[[X:[a-z0-9]*]]: memref<?x64xf32>
// CHECK-SAME:    %[[OUT:[a-z0-9]*]]: memref<?x64xf32>, %[[WS:[a-z0-9]*]]: memref<?xi8>, %{{.*}}: index)
// CHECK:         %[[H:.*]] = memref.view %[[WS]]
// CHECK:         %[[UP:.*]] = "kernel.spmm"
// CHECK:         bufferization.materialize_in_destination %[[UP]] in restrict writable %[[H]]
// CHECK:         %[[S:.*]] = memref.view %[[WS]]
// CHECK:         scf.for
// CHECK:           scf.for
// CHECK:             vector.maskedload %[[H]]
// CHECK:             arith.select
// CHECK:             arith.addf
// CHECK:           vector.reduction <add>
// CHECK:           memref.store %{{.*}}, %[[S]]
// CHECK:         %[[DOWN:.*]] = "kernel.spmm"
// CHECK:         bufferization.materialize_in_destination %[[DOWN]] in restrict writable %[[OUT]]
func.func @region(%x: tensor<?x64xf32>, %up: tensor<200x64xf32, "windows(reduction=1, lanes=16)">, %down: tensor<64x200xf32, "windows(reduction=1, lanes=16)">) -> tensor<?x64xf32> {
  %h = "kernel.spmm"(%x, %up) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {schedule = "lookup", tile = [4], lanes = 16, reduction = 1} : (tensor<?x64xf32>, tensor<200x64xf32, "windows(reduction=1, lanes=16)">) -> tensor<?x200xf32>
  %s = "kernel.sum"() ({
    %0 = "kernel.read"(%h) {map = affine_map<(d0, d1) -> (d0, d1)>} : (tensor<?x200xf32>) -> f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {size = 200} : () -> tensor<?x1xf32>
  %y = "kernel.spmm"(%h, %down) ({
  ^bb0(%sum: f32):
    %1 = "kernel.read"(%s) {map = affine_map<(d0, d1) -> (d0, 0)>} : (tensor<?x1xf32>) -> f32
    %2 = arith.mulf %sum, %1 : f32
    "kernel.yield"(%2) : (f32) -> ()
  }) {schedule = "lookup", tile = [4], lanes = 16, reduction = 1} : (tensor<?x200xf32>, tensor<64x200xf32, "windows(reduction=1, lanes=16)">) -> tensor<?x64xf32>
  return %y : tensor<?x64xf32>
}
