// Several values that a function returns are as many results of one kernel.contract.
// RUN: gossamer-opt %s -p fuse-epilogue --split-input-file | filecheck %s

// An activation, and its derivative.
// CHECK-LABEL: func.func @two(
// CHECK:         %[[Y:.*]]:2 = "kernel.contract"(%arg0, %arg1)
// CHECK-NEXT:    ^bb0(%[[SUM:.*]]: f32):
// CHECK-NEXT:      %[[TANH:.*]] = math.tanh %[[SUM]]
// CHECK-NEXT:      %[[SQUARE:.*]] = arith.mulf %[[TANH]], %[[TANH]]
// CHECK-NEXT:      %[[DERIVATIVE:.*]] = arith.subf %{{.*}}, %[[SQUARE]]
// CHECK-NEXT:      "kernel.yield"(%[[DERIVATIVE]], %[[TANH]]) : (f32, f32) -> ()
// CHECK:         return %[[Y]]#0, %[[Y]]#1
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
#tm = affine_map<(t, m) -> (t, m)>
#tk = affine_map<(t, m, k) -> (t, k)>
#mk = affine_map<(t, m, k) -> (m, k)>
#sum = affine_map<(t, m, k) -> (t, m)>
func.func @two(%x: tensor<?x8xf32>, %w: tensor<4x8xf32, #CSR>) -> (tensor<?x4xf32>, tensor<?x4xf32>) {
  %c0 = arith.constant 0 : index
  %init = arith.constant 0.0 : f32
  %one = arith.constant 1.0 : f32
  %tokens = tensor.dim %x, %c0 : tensor<?x8xf32>
  %e = tensor.empty(%tokens) : tensor<?x4xf32>
  %start = linalg.fill ins(%init : f32) outs(%e : tensor<?x4xf32>) -> tensor<?x4xf32>
  %xw = linalg.generic {indexing_maps = [#tk, #mk, #sum], iterator_types = ["parallel", "parallel", "reduction"]}
    ins(%x, %w : tensor<?x8xf32>, tensor<4x8xf32, #CSR>) outs(%start : tensor<?x4xf32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %p = arith.mulf %a, %b : f32
    %s = arith.addf %o, %p : f32
    linalg.yield %s : f32
  } -> tensor<?x4xf32>
  %0 = linalg.generic {indexing_maps = [#tm, #tm], iterator_types = ["parallel", "parallel"]}
    ins(%xw : tensor<?x4xf32>) outs(%e : tensor<?x4xf32>) {
  ^bb0(%a: f32, %o: f32):
    %v = math.tanh %a : f32
    linalg.yield %v : f32
  } -> tensor<?x4xf32>
  %1 = linalg.generic {indexing_maps = [#tm, #tm], iterator_types = ["parallel", "parallel"]}
    ins(%0 : tensor<?x4xf32>) outs(%e : tensor<?x4xf32>) {
  ^bb0(%a: f32, %o: f32):
    %v = arith.mulf %a, %a : f32
    %d = arith.subf %one, %v : f32
    linalg.yield %d : f32
  } -> tensor<?x4xf32>
  return %1, %0 : tensor<?x4xf32>, tensor<?x4xf32>
}

// -----

// The same value may be returned twice.
// CHECK-LABEL: func.func @twice(
// CHECK:         %[[Y:.*]]:2 = "kernel.contract"(%arg0, %arg1)
// CHECK-NEXT:    ^bb0(%[[SUM:.*]]: f32):
// CHECK-NEXT:      "kernel.yield"(%[[SUM]], %[[SUM]]) : (f32, f32) -> ()
// CHECK:         return %[[Y]]#0, %[[Y]]#1
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
#tk = affine_map<(t, m, k) -> (t, k)>
#mk = affine_map<(t, m, k) -> (m, k)>
#sum = affine_map<(t, m, k) -> (t, m)>
func.func @twice(%x: tensor<?x8xf32>, %w: tensor<4x8xf32, #CSR>) -> (tensor<?x4xf32>, tensor<?x4xf32>) {
  %c0 = arith.constant 0 : index
  %init = arith.constant 0.0 : f32
  %tokens = tensor.dim %x, %c0 : tensor<?x8xf32>
  %e = tensor.empty(%tokens) : tensor<?x4xf32>
  %start = linalg.fill ins(%init : f32) outs(%e : tensor<?x4xf32>) -> tensor<?x4xf32>
  %xw = linalg.generic {indexing_maps = [#tk, #mk, #sum], iterator_types = ["parallel", "parallel", "reduction"]}
    ins(%x, %w : tensor<?x8xf32>, tensor<4x8xf32, #CSR>) outs(%start : tensor<?x4xf32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %p = arith.mulf %a, %b : f32
    %s = arith.addf %o, %p : f32
    linalg.yield %s : f32
  } -> tensor<?x4xf32>
  return %xw, %xw : tensor<?x4xf32>, tensor<?x4xf32>
}
