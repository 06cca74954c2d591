// RUN: not gossamer-opt %s -p 'expose-storage{arrays=true},lower-attend-edges' 2>&1 | filecheck %s

// CHECK: its pattern is tensor<?x?xf32, {{.*}}compressed, {{.*}}must be CSR
#DCSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : compressed, d1 : compressed)}>
func.func @attend(%a: tensor<?x?xf32, #DCSR>, %v: tensor<?x18xf32>) -> (tensor<?x18xf32>, tensor<?x4xf32>) {
  %y, %s = "kernel.attend_edges"(%a, %v) {
    heads = 2 : i64, weighted = 0 : i64, scale = 1.0 : f64, slope = 0.2 : f64, operandSegmentSizes = array<i32: 1, 1, 0, 0, 0, 0, 0, 0, 0>, dropout = 0.0 : f64
  } : (tensor<?x?xf32, #DCSR>, tensor<?x18xf32>) -> (tensor<?x18xf32>, tensor<?x4xf32>)
  return %y, %s : tensor<?x18xf32>, tensor<?x4xf32>
}
